"""Output of a task, also of C code: captured, and found again if the process died.

It goes to a file of the process, next to Ray's logs, and is returned with the result. If the
process died, the file remains there. Like all that tasks import, this module imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ray

from raypipe.graph.launcher import TaskResult
from raypipe.launch.task import run_guarded
from raypipe.provenance import now

#: bytes of the beginning and of the end of a task's output
_HEAD, _TAIL = 16 * 1024, 48 * 1024
_SUFFIX = ".raypipe"
_STANDARD = (1, 2)  # standard output and standard error


def run_captured(pool: str, key: str, attempt: int, *arguments: Any) -> TaskResult:
    """Run a task with ``run_guarded`` in a worker, and return what it printed with its result.

    ``pool`` is a unique name: tasks of other pools and commands may have the same key.
    """
    with _captured(pool, key, attempt) as output:
        result = run_guarded(key, attempt, *arguments)
    text = output()
    return replace(result, output=text) if text else result


@contextmanager
def _captured(pool: str, key: str, attempt: int) -> Iterator[Callable[[], str]]:
    """Capture the output of the body; yield a function that returns it afterwards."""
    file, text = _file(), ""
    if file is None:
        yield lambda: ""
        return
    header = _header(pool, key, attempt) + f"{now()}\n".encode()
    os.ftruncate(file, 0)
    os.write(file, header)
    with redirected(file):
        yield lambda: text
    if os.fstat(file).st_size > len(header):
        text = _bounded(file, len(header))
    os.ftruncate(file, 0)


@contextmanager
def redirected(file: int) -> Iterator[None]:
    """Redirect standard output and standard error of this process to a file.

    ``breakpoint()`` fails then. Ray would wait for a debugger that nobody may start.
    """
    os.environ["PYTHONBREAKPOINT"] = f"{__name__}.no_breakpoint"
    _flush()
    saved = [os.dup(each) for each in _STANDARD]
    for each in _STANDARD:
        os.dup2(file, each)
    try:
        yield
    finally:
        _flush()
        for copy, each in zip(saved, _STANDARD, strict=True):
            os.dup2(copy, each)
            os.close(copy)


def _flush() -> None:
    """Flush the buffers of Python and of C."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the user's code closed it
            stream.flush()
    _c_library().fflush(None)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _header(pool: str, key: str, attempt: int) -> bytes:
    """Return the first line of a task's output, by which it is found; its start is the second."""
    return f"{json.dumps([pool, key, attempt])}\n".encode()


def _folder() -> Path | None:
    """Return the folder of Ray's logs on this node; None if it is not known."""
    context = ray.get_runtime_context()
    try:
        folder = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    except (AttributeError, RuntimeError):  # an earlier Ray, or a client of a cluster
        return None
    return folder if folder.is_dir() else None


@cache
def _file() -> int | None:
    """Return the descriptor of the file of this process; None if there is no folder for it."""
    if (folder := _folder()) is None:
        return None
    return os.open(f"{folder}/{os.getpid()}{_SUFFIX}", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)


def _bounded(file: int, begin: int) -> str:
    """Return a file's text from a position on, without its middle if it is long."""
    size = os.fstat(file).st_size
    if size - begin <= _HEAD + _TAIL:
        return os.pread(file, size - begin, begin).decode(errors="replace")
    head = os.pread(file, _HEAD, begin).decode(errors="replace")
    tail = os.pread(file, _TAIL, size - _TAIL).decode(errors="replace")
    left_out = size - begin - _HEAD - _TAIL
    return f"{head}\n... {left_out} bytes left out ...\n{tail}"


def take_output(pool: str, key: str, attempt: int) -> tuple[str, str | None]:
    """Return and remove the output of a dead process that ran a task of a pool on this node.

    Returns:
        The output, and the start of the task as in ``TaskResult``; None if nothing is found.

    """
    header = _header(pool, key, attempt)
    for path in (_folder() or Path("/nonexistent")).glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                if os.pread(file, len(header), 0) == header:
                    path.unlink()
                    start = os.pread(file, 64, len(header)).partition(b"\n")[0]
                    return _bounded(file, len(header) + len(start) + 1), start.decode()
            finally:
                os.close(file)
    return "", None


def no_breakpoint(*arguments: Any, **options: Any) -> None:
    """Raise RuntimeError with the way to use a debugger."""
    del arguments, options
    raise RuntimeError(
        "breakpoint() needs a terminal, and this process has none: use `raypipe run --local`, "
        "which runs everything in one process"
    )
