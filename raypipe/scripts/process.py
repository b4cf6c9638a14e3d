"""Process of a script: started with a guard, its output copied to a log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from raypipe.redaction import Redactor, last_state
from raypipe.scripts import guard

#: last lines of the standard error that are kept for the message of a failure
_MOST_LINES = 200
_LONGEST_LINE = 2000
#: seconds that the guard needs beyond the grace period
_END_S = 15.0


@dataclass(frozen=True)
class Exit:
    """End of a script: its exit status (negative: a signal), and its largest process."""

    status: int
    peak_bytes: int


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

    def __init__(
        self,
        argv: Sequence[str],
        directory: str,
        environment: Mapping[str, str],
        log: Path,
        grace_s: float,
        on_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._argv = list(argv)
        self._wanted = {
            "argv": self._argv,
            "cwd": directory,
            "env": dict(environment),
            "grace_s": grace_s,
        }
        self._log, self._grace_s, self._on_line = log, grace_s, on_line
        self._errors: deque[str] = deque(maxlen=_MOST_LINES)
        self._exit: Exit | None = None
        self._told = threading.Event()

    def __enter__(self) -> ScriptProcess:
        """Start the script. Raises ValueError if it cannot be started."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(out_end, err_end),
            start_new_session=True,
        )
        os.close(out_end)
        os.close(err_end)
        self._file = self._log.open("ab", buffering=0)
        copies = ((out, self._on_line), (err, self._keep_error))
        self._threads = [
            threading.Thread(target=_copy, args=(end, self._file, keep), daemon=True)
            for end, keep in copies
        ]
        for thread in self._threads:
            thread.start()
        self._write({**self._wanted, "stdout": out_end, "stderr": err_end})
        first = json.loads(self._read() or '{"error": "the guard ended"}')
        if "error" in first:
            self.__exit__(None, None, None)
            raise ValueError(f"{self._argv[0]}: cannot be started: {first['error']}")
        self.pid: int = first["pid"]
        threading.Thread(target=self._await_exit, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the script if it runs, and wait until none of its processes is left."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            self._guard.wait(self._grace_s + _END_S)
        finally:
            for thread in self._threads:
                thread.join(_END_S)
            self._file.close()

    @property
    def guard_pid(self) -> int:
        """The process whose descendants are the script's processes."""
        return self._guard.pid

    def poll(self) -> Exit | None:
        """Return the end of the script, None while it runs."""
        return self._exit if self._told.is_set() else None

    def end(self) -> None:
        """Ask the script to end: SIGTERM, after the grace period SIGKILL."""
        self._write({})

    def errors(self) -> list[str]:
        """Return the last lines of the standard error of the script, once it has ended."""
        for thread in self._threads:
            thread.join(_END_S)
        return list(self._errors)

    def _keep_error(self, line: str) -> None:
        self._errors.append(line[:_LONGEST_LINE])

    def _await_exit(self) -> None:
        line = self._read()
        if line:
            told = json.loads(line)
            self._exit = Exit(told["exit"], told["peak_bytes"])
        else:  # somebody killed the guard, and with it the script
            self._exit = Exit(-9, 0)
        self._told.set()

    def _read(self) -> bytes:
        return self._guard.stdout.readline() if self._guard.stdout is not None else b""

    def _write(self, message: Mapping[str, object]) -> None:
        try:
            if self._guard.stdin is not None:
                self._guard.stdin.write(json.dumps(message).encode() + b"\n")
                self._guard.stdin.flush()
        except BrokenPipeError:
            pass  # the guard has ended, and with it the script


def _copy(descriptor: int, log: BinaryIO, keep: Callable[[str], None]) -> None:
    """Copy an output to the log without credentials, and pass on its lines."""
    rest, redactor = b"", Redactor(log.write)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        while chunk := stream.read(65536):
            redactor.write(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-1_000_000:]
            for line in lines:
                keep(_text(line))
    redactor.flush()
    if rest:
        keep(_text(rest))


def _text(line: bytes) -> str:
    return last_state(line.decode(errors="replace"))
