"""CPU task: one function call with limited threads and time, whose output is captured.

Like all that tasks import, this module imports no torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import time
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from raypipe import faults, process_tree
from raypipe.errors import Interrupted, UnitError, message_of, trace_of
from raypipe.graph.launcher import TaskResult
from raypipe.provenance import now

_STANDARD = (1, 2)  # standard output and standard error
#: bytes of the beginning and of the end of a task's output
_HEAD, _TAIL = 16 * 1024, 48 * 1024


def run_in_worker(
    name: str, key: str, attempt: int, threads: int, limit_s: float | None, *call: Any
) -> TaskResult:
    """Run a task with ``run_task`` in a worker, whose guard ends what the task started.

    What it prints goes to a file next to Ray's logs, and is returned with its result. If the
    process dies, the file remains there. At the time limit the process ends, whatever blocks it,
    and writes a stack trace to standard error. ``name`` is that of the file, unique to the attempt.
    """
    path = _folder() / name
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        begin = os.write(file, f"{now()}\n".encode())
        _start_guard()
        with redirected(file), forks_end_at(signal.SIGTERM):
            if limit_s is not None:
                faulthandler.dump_traceback_later(limit_s, exit=True)
            result = run_task(key, attempt, threads, *call)
        return replace(result, output=_bounded(file, begin))
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(file)
        path.unlink(missing_ok=True)


def take_output(name: str) -> tuple[str, str | None]:
    """Return and remove the output of a dead process that ran this attempt of a task on this node.

    Returns:
        The output, and the start of the task as in ``TaskResult``; None if nothing is found.

    """
    path = _folder() / name
    with suppress(OSError), path.open("rb") as file:
        path.unlink()
        start = file.readline()
        return _bounded(file.fileno(), len(start)), start.decode().strip() or None
    return "", None


@cache
def _folder() -> Path:
    """Return the folder of Ray's logs on this node, else of temporary files."""
    import ray

    context = ray.get_runtime_context()
    with suppress(AttributeError, RuntimeError):  # an earlier Ray, or a client of a cluster
        folder = Path(context.get_temp_dir(), context.get_session_name(), "logs")
        if folder.is_dir():
            return folder
    return Path(tempfile.gettempdir())


def _bounded(file: int, begin: int) -> str:
    """Return a file's text from a position on, without its middle if it is long."""
    size = os.fstat(file).st_size
    if size - begin <= _HEAD + _TAIL:
        return os.pread(file, size - begin, begin).decode(errors="replace")
    head = os.pread(file, _HEAD, begin).decode(errors="replace")
    tail = os.pread(file, _TAIL, size - _TAIL).decode(errors="replace")
    left_out = size - begin - _HEAD - _TAIL
    return f"{head}\n... {left_out} bytes left out ...\n{tail}"


@cache
def _start_guard() -> None:
    """Start the guard of this process, which is soon not a process of it."""
    process_tree.start().wait()
    process_tree.adopt_orphans()


def run_task(
    key: str, attempt: int, threads: int, function: Callable[..., Any], *arguments: Any
) -> TaskResult:
    """Run a function with limited math threads; an exception becomes the result.

    Workers are reused and keep their thread counts, so the limit is set for every task. What a
    process has once is as before afterwards: see ``_as_before``.
    """
    faults.from_environment().at_task(key, attempt)
    outcome: dict[str, Any]
    at, clock, cpu = now(), time.perf_counter(), time.process_time()
    try:
        with threadpool_limits(limits=threads), _as_before():
            outcome = {"value": function(*arguments)}
    except UnitError as error:
        outcome = {"error": error.message, "kind": error.kind, "trace": error.trace}
    except (BdbQuit, Interrupted):  # the user ended the debugger or the command
        raise
    except BaseException as error:  # a user's function may raise anything
        if hasattr(error, "ray_terminate_msg"):  # the SystemExit by which Ray ends a worker
            raise
        kind = "host_out_of_memory" if isinstance(error, MemoryError) else "error"
        outcome = {"error": message_of(error), "kind": kind, "trace": trace_of(error)}
    return TaskResult(
        key,
        attempt=attempt,
        duration_s=time.perf_counter() - clock,
        cpu_s=time.process_time() - cpu,
        started_at=at,
        worker=f"{socket.gethostname()}:{os.getpid()}",
        **outcome,
    )


@contextmanager
def _as_before() -> Iterator[None]:
    """Restore what a process has once and a task may change: other tasks run in it later.

    That is the working directory, the environment, ``sys.argv``, ``sys.path``, and the objects of
    standard output and error. State of modules stays, as it is what makes a second call faster.
    """
    directory, environment = _directory(), os.environ.copy()
    lists = [(name, getattr(sys, name), getattr(sys, name).copy()) for name in ("argv", "path")]
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for name, value, before in lists:
            value[:] = before
            setattr(sys, name, value)
        if os.environ.copy() != environment:
            for name in {*os.environ} - {*environment}:
                del os.environ[name]
            os.environ.update(environment)
        if directory is not None and _directory() != directory:
            with suppress(OSError):  # somebody has removed it
                os.chdir(directory)


@contextmanager
def forks_end_at(*signals: signal.Signals) -> Iterator[None]:
    """Processes that the body forks end at these signals, whatever handlers this process has.

    A pool ends its processes by SIGTERM and waits until they have ended.
    """
    _ending.update(signals)
    try:
        yield
    finally:
        _ending.clear()


#: signals that end what the task of this process forks
_ending: set[signal.Signals] = set()


def _default_handlers() -> None:
    for number in _ending:
        is_ctrl_c = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ending)
    _ending.clear()


# Python discards a signal that arrives during a fork, so these are blocked until the child has
# its handlers.
os.register_at_fork(
    before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _ending),
    after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _ending),
    after_in_child=_default_handlers,
)


def _directory() -> str | None:
    """Return the working directory; None if it was removed."""
    with suppress(OSError):
        return str(Path.cwd())
    return None


@contextmanager
def redirected(file: int) -> Iterator[None]:
    """Redirect standard output and standard error of this process to a file.

    ``breakpoint()`` fails then. Ray would wait for a debugger that nobody may start.
    """
    os.environ["PYTHONBREAKPOINT"] = f"{__name__}.no_breakpoint"
    _flush()
    saved = {number: os.dup(number) for number in _STANDARD}
    for number in _STANDARD:
        os.dup2(file, number)
    try:
        yield
    finally:
        _flush()
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    """Flush the buffers of Python and of C."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the user's code closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def no_breakpoint(*arguments: Any, **options: Any) -> None:
    """Raise RuntimeError with the way to use a debugger."""
    del arguments, options
    raise RuntimeError(
        "breakpoint() needs a terminal, and this process has none: use `raypipe run --local`, "
        "which runs everything in one process"
    )
