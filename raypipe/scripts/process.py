"""Process of a script: its end, its output copied to a log, and how it failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

import psutil

from raypipe import process_tree
from raypipe.errors import BatchLimit, FailureKind, UnitError
from raypipe.redaction import Redactor, last_state
from raypipe.training.failure_kinds import failure_kind

#: last lines of the standard error that are kept, and those of them in the message of a failure
_MOST_LINES, _MOST_SHOWN = 200, 30
_LONGEST_LINE = 2000
#: bytes of a line that is not complete which wait for its end
_LONGEST_WAIT = 1_000_000
#: seconds for the rest of the output once all processes have ended
_END_S = 15.0
#: seconds in which processes that the script left may end by themselves
_LEFT_S = 1.0
# of frameworks other than torch, which `training/failure_kinds.py` does not see as exceptions
_GPU_SIGNS = ("RESOURCE_EXHAUSTED: Out of memory", "ResourceExhaustedError", "HIP out of memory")
_TRACEBACK = "Traceback (most recent call last)"
#: torchrun's report of a process that a signal ended
_KILLED = re.compile(r"exitcode\s*:\s*-(\d+)")
_EXCEPTION = re.compile(r"(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*)(?::.*)?")
#: exit statuses of a shell whose program a signal ended
_BY_SIGNAL = {128 + number for number in (4, 6, 7, 8, 9, 11, 15)}


@dataclass
class ScriptProcess:
    """Context manager of a running script; at its end no process of the script is left.

    Args:
        argv: the program and its arguments.
        directory: its working directory.
        environment: its environment variables, all of them.
        log: receives the standard output and the standard error.
        grace_s: seconds between SIGTERM and SIGKILL.
        on_line: receives each line of the standard output.

    """

    argv: Sequence[str]
    directory: Path
    environment: Mapping[str, str]
    log: Path
    grace_s: float
    on_line: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._errors: deque[str] = deque(maxlen=_MOST_LINES)
        #: the processes that this one had started before
        self._others: dict[int, psutil.Process] = {}
        #: when the script is killed
        self._end_at = float("inf")

    def __enter__(self) -> ScriptProcess:
        """Start the script. Raises ValueError if the system refuses its arguments."""
        process_tree.adopt_orphans()
        process_tree.add_started([os.getpid()], self._others)
        try:
            self._script = subprocess.Popen(
                self.argv,
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{self.argv[0]}: cannot be started: {why}") from error
        self._file = self.log.open("ab", buffering=0)
        copies = (self._script.stdout, self.on_line), (self._script.stderr, self._keep_error)
        self._threads = [
            threading.Thread(target=_copy, args=(stream, self._file, keep), daemon=True)
            for stream, keep in copies
        ]
        for thread in self._threads:
            thread.start()
        self._guard = process_tree.start(self._script.pid, self.grace_s)
        return self

    def __exit__(self, *error: object) -> None:
        """End the script if it runs, and wait until none of its processes is left."""
        self.end()
        self.errors()
        self._guard.kill()
        self._guard.communicate()
        self._file.close()
        process_tree.adopt_orphans(False)

    @property
    def pid(self) -> int:
        """The process of the script."""
        return self._script.pid

    def poll(self) -> int | None:
        """Return the exit status of the script, None while it runs."""
        if self._script.returncode is None and time.monotonic() > self._end_at:
            self._script.kill()
        return self._script.poll()

    def end(self) -> None:
        """Ask the script to end: SIGTERM, after the grace period SIGKILL."""
        if self._end_at == float("inf") and self._script.poll() is None:
            self._end_at = time.monotonic() + self.grace_s
            self._script.terminate()

    def errors(self) -> list[str]:
        """Return the last lines of the standard error of the script, once it has ended.

        What it left running ends, too.
        """
        tree, is_asked = dict[int, psutil.Process](), self._end_at < float("inf")
        left = [os.getpid()], {*self._others, self._guard.pid}  # orphans are of this process
        process_tree.await_end(
            tree, self._end_at - time.monotonic() if is_asked else _LEFT_S, *left
        )
        process_tree.end_all(tree, *left)
        self._script.wait()
        for thread in self._threads:
            thread.join(_END_S)
        return list(self._errors)

    def _keep_error(self, line: str) -> None:
        self._errors.append(line[:_LONGEST_LINE])


def _copy(stream: IO[bytes], log: BinaryIO, keep: Callable[[str], None]) -> None:
    """Copy an output to the log without credentials, in whole lines, and pass these on.

    Another output of the same script is written into the same log.
    """
    rest, waiting = b"", bytearray()
    redactor = Redactor(waiting.extend)
    with stream:
        while chunk := os.read(stream.fileno(), 65536):
            redactor.write(chunk)
            whole = max(waiting.rfind(b"\n"), waiting.rfind(b"\r")) + 1
            if len(waiting) - whole > _LONGEST_WAIT:
                whole = len(waiting)
            log.write(waiting[:whole])
            del waiting[:whole]
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_LONGEST_WAIT:]
            for line in lines:
                keep(last_state(line.decode(errors="replace")))
    redactor.flush()
    log.write(waiting)
    if rest:
        keep(last_state(rest.decode(errors="replace")))


def failure_of(
    unit: str, status: int, errors: Sequence[str], micro_batch: int, killed_by_kernel: bool
) -> UnitError:
    """Return the failure of a script that ended with a status other than 0.

    Args:
        unit: the unit's key.
        status: the exit status; negative: the signal that ended it.
        errors: the last lines of its standard error.
        micro_batch: the samples that did not fit if it ran out of memory; 1 if a smaller number
            could not be passed on.
        killed_by_kernel: whether the kernel ended processes for lack of memory meanwhile.

    """
    text, cause = "\n".join(errors), _cause(errors)
    shown = "\n".join(line for line in errors[-_MOST_SHOWN:] if line.strip())
    number, how = _signal_of(status, text), f"exit status {status}"
    if number is not None:
        known = number in set(signal.Signals)
        how = f"ended by {signal.Signals(number).name if known else f'signal {number}'}"
    message = f"{how}: {cause}" if cause else how
    message += f"\n{shown}" if shown else "; it wrote nothing to standard error"
    kind = _kind(text, cause)
    if kind == "error" and number is not None:
        kind = "worker_died"
        if number == signal.SIGKILL and killed_by_kernel:
            kind = "host_out_of_memory"
            message = f"the kernel ended it for lack of memory ({how})\n{shown}"
    limit = BatchLimit("training", micro_batch) if kind == "out_of_memory" else None
    return UnitError(unit, kind, message, limit)


def oom_kills() -> int:
    """Return how many processes the kernel has ended for lack of memory, of this control group.

    If the group does not tell, of the machine; 0 if it does not either.
    """
    with suppress(OSError):
        group = re.search(r"^0::(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        own = Path(f"/sys/fs/cgroup{group[1] if group else ''}/memory.events")
        text = (own if own.exists() else Path("/proc/vmstat")).read_text()
        if found := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(found[1])
    return 0


def _kind(text: str, cause: str) -> FailureKind:
    name = cause.partition(":")[0].rpartition(".")[2]
    if name in ("MemoryError", "ArrayMemoryError", "_ArrayMemoryError"):
        return "host_out_of_memory"
    if name == "FloatingPointError":
        return "invalid_value"
    if name == "OutOfMemoryError" or any(sign in text for sign in _GPU_SIGNS):
        return "out_of_memory"
    return failure_kind(RuntimeError(text))


def _signal_of(status: int, text: str) -> int | None:
    """Return the signal that ended the script, or one of its processes under torchrun."""
    if status < 0 or status in _BY_SIGNAL:
        return -status if status < 0 else status - 128
    found = _KILLED.search(text)
    return int(found[1]) if found is not None else None


def _cause(errors: Sequence[str]) -> str:
    """Return the exception of the last Python traceback, else the last line."""
    starts = [number for number, line in enumerate(errors) if _TRACEBACK in line]
    for line in errors[starts[-1] + 1 :] if starts else ():
        if line and not line[0].isspace() and _EXCEPTION.fullmatch(line):
            return line.strip()
    return next((line.strip() for line in reversed(errors) if line.strip()), "")
