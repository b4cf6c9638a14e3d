"""Failure of a script: its kind and message, from the exit status and the standard error."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from raypipe.errors import BatchLimit, FailureKind, UnitError
from raypipe.training.oom import failure_kind

# of frameworks other than torch, which `training/oom.py` does not see as exceptions
_GPU_SIGNS = ("RESOURCE_EXHAUSTED: Out of memory", "ResourceExhaustedError", "HIP out of memory")
_TRACEBACK = "Traceback (most recent call last)"
#: torchrun's report of a process that a signal ended
_KILLED = re.compile(r"exitcode\s*:\s*-(\d+)")
_EXCEPTION = re.compile(r"(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*)(?::.*)?")
#: exit statuses of a shell whose program a signal ended
_SHELL = {128 + number for number in (4, 6, 7, 8, 9, 11, 15)}
_MOST_SHOWN = 30


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
    text = "\n".join(errors)
    number = _signal_of(status, text)
    how = f"exit status {status}" if number is None else f"ended by {_name(number)}"
    cause = _cause(errors)
    shown = "\n".join(line for line in errors[-_MOST_SHOWN:] if line.strip())
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
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.split(":", 2)[2] for line in lines if line.startswith("0:"))
        events = Path(f"/sys/fs/cgroup{own}/memory.events").read_text()
        return _count(events)
    with suppress(OSError, ValueError, StopIteration):
        return _count(Path("/proc/vmstat").read_text())
    return 0


def _count(text: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))


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
    if status < 0:
        return -status
    if status in _SHELL:
        return status - 128
    found = _KILLED.search(text)
    return int(found[1]) if found is not None else None


def _cause(errors: Sequence[str]) -> str:
    """Return the exception of the last Python traceback, else the last line."""
    starts = [number for number, line in enumerate(errors) if _TRACEBACK in line]
    for line in errors[starts[-1] + 1 :] if starts else ():
        if line and not line[0].isspace() and _EXCEPTION.fullmatch(line):
            return line.strip()
    return next((line.strip() for line in reversed(errors) if line.strip()), "")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
