"""CPU task: function calls with limited threads and time, whose output is captured.

Like all that tasks import, this module imports no torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from raypipe import faults
from raypipe.errors import Interrupted, UnitError, message_of, trace_of
from raypipe.graph.launcher import TaskResult
from raypipe.provenance import now

_C_LIBRARY = ctypes.CDLL(None)
_STANDARD = (1, 2)  # standard output and standard error
#: bytes of the beginning and of the end of a task's output
_HEAD, _TAIL = 16 * 1024, 48 * 1024
#: bytes of results after which a chunk begins no further call
_CHUNK_BYTES = 2**20
#: end of the name of the file with the results of a chunk that runs
_RESULTS = ".results"


@dataclass(frozen=True)
class Shared:
    """Place of an argument among those that calls of a chunk share."""

    place: int


def run_in_worker(
    name: str,
    threads: int,
    limit_s: float | None,
    chunk_s: float,
    calls: Sequence[tuple[str, int, Callable[..., Any], tuple[Any, ...]]],
    *shared: Any,
) -> bytes:
    """Run a chunk of calls in sequence in a worker, whose guard ends what they started.

    What they print goes to a file next to Ray's logs, and is returned with the results. If the
    process dies, the file remains there, and another one with the results so far. At the time
    limit of a call the process ends, whatever blocks it, and writes a stack trace to standard
    error. A chunk ends early once it took its time, or its results have a megabyte.

    Args:
        name: of the files, unique to the chunk.
        threads: math threads.
        limit_s: seconds that a call may take.
        chunk_s: seconds after which no further call begins.
        calls: key, number of the attempt, function and arguments of each.
        shared: the values of arguments that are ``Shared``.

    Returns:
        The pickled results of the calls that began, for ``unpacked``.

    """
    path = _folder() / name
    printed = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    kept = os.open(f"{path}{_RESULTS}", os.O_WRONLY | os.O_CREAT, 0o600)
    injected, limits = faults.from_environment(), MathThreads()
    packed, size, begin, end = list[bytes](), 0, 0, time.monotonic() + chunk_s
    try:
        _start_guard()
        with redirected(printed), forks_end_at(signal.SIGTERM):
            for key, attempt, function, arguments in calls:
                at = now()
                before = packed[-1] if packed else b""
                os.write(kept, before + pickle.dumps((at, begin)))
                if limit_s is not None:
                    faulthandler.dump_traceback_later(limit_s, exit=True)
                limits.apply(threads)
                given = (shared[a.place] if isinstance(a, Shared) else a for a in arguments)
                result = _run(injected, key, attempt, at, function, *given)
                _flush()
                if (written := os.fstat(printed).st_size) > begin:
                    result = result._replace(output=_bounded(printed, begin))
                    begin = written
                packed.append(_packed(result))
                size += len(packed[-1])
                if time.monotonic() > end or size > _CHUNK_BYTES:
                    break
        return b"".join(packed)
    finally:
        faulthandler.cancel_dump_traceback_later()
        for file in (printed, kept):
            os.close(file)
        path.unlink(missing_ok=True)
        Path(f"{path}{_RESULTS}").unlink(missing_ok=True)


def _packed(result: TaskResult) -> bytes:
    """Return a pickled result; one whose value cannot be sent is an error."""
    try:
        return pickle.dumps(result)
    except Exception:  # objects raise anything; cloudpickle also sends what no module has
        from ray import cloudpickle  # not where a command runs without Ray

        try:
            return bytes(cloudpickle.dumps(result))
        except Exception as error:
            message = f"its value cannot be sent back ({message_of(error)}); return plain values"
            lost = result._replace(value=None, error=message, kind="error", trace=trace_of(error))
            return pickle.dumps(lost)


def unpacked(content: bytes) -> list[TaskResult]:
    """Return the results of a chunk."""
    stream, results = BytesIO(content), list[TaskResult]()
    while stream.tell() < len(content):
        results.append(pickle.load(stream))
    return results


def take_remains(name: str) -> tuple[list[TaskResult], str | None, str]:
    """Return and remove what a process left on this node that died in a chunk.

    Returns:
        The results before the call in which it died; the start of that call as in ``TaskResult``,
        None if nothing is found; and what it printed.

    """
    path, results, start, begin = _folder() / name, list[TaskResult](), None, 0
    kept = Path(f"{path}{_RESULTS}")
    with suppress(OSError, EOFError, pickle.UnpicklingError), kept.open("rb") as stream:
        kept.unlink()
        while True:
            start, begin = pickle.load(stream)
            results.append(pickle.load(stream))
    with suppress(OSError), path.open("rb") as file:
        path.unlink()
        return results, start, _bounded(file.fileno(), begin)
    return results, start, ""


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
    from raypipe import process_tree  # only workers need it, not --local

    process_tree.start().wait()
    process_tree.adopt_orphans()


class MathThreads:
    """Limit of the math threads of this process.

    Workers are reused and keep their thread counts, so each chunk sets it; and since calls load
    libraries, it is set again once there are more modules.
    """

    def __init__(self) -> None:
        self._limits: list[threadpool_limits] = []
        self._set = (0, 0)

    def apply(self, number: int) -> None:
        """Set the limit in the libraries that are loaded now."""
        if self._set != (now := (number, len(sys.modules))):
            self._limits.append(threadpool_limits(number))
            self._set = now

    def restore(self) -> None:
        """Set the numbers that there were before."""
        while self._limits:
            self._limits.pop().restore_original_limits()


def run_task(key: str, function: Callable[..., Any], *arguments: Any) -> TaskResult:
    """Run a function in this process; an exception becomes the result.

    What a process has once is as before afterwards: see ``_as_before``.
    """
    return _run(faults.from_environment(), key, 1, now(), function, *arguments)


def _run(
    injected: faults.Faults,
    key: str,
    attempt: int,
    at: str,
    function: Callable[..., Any],
    *arguments: Any,
) -> TaskResult:
    injected.at_task(key, attempt)
    outcome: dict[str, Any]
    clock, cpu = time.perf_counter(), time.process_time()
    try:
        with _as_before():
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
    directory, environment = _directory(), _environment()
    environment.clear()
    lists = [(name, getattr(sys, name), getattr(sys, name).copy()) for name in ("argv", "path")]
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for name, value, before in lists:
            value[:] = before
            setattr(sys, name, value)
        for before in environment[:1]:
            for name in {*os.environ} - {*before}:
                del os.environ[name]
            os.environ.update(before)
        if directory is not None and _directory() != directory:
            with suppress(OSError):  # somebody has removed it
                os.chdir(directory)


@cache
def _environment() -> list[dict[str, str]]:
    """Return a list to which the environment is added before it changes, if the list is empty.

    Python raises an audit event before a change. A copy for each call would take most of the time
    that a call costs.
    """
    copies: list[dict[str, str]] = []

    def note(event: str, _: tuple[Any, ...]) -> None:
        if event in ("os.putenv", "os.unsetenv") and not copies:
            copies.append(os.environ.copy())

    sys.addaudithook(note)
    return copies


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
    try:
        return os.getcwd()  # noqa: PTH109 - before and after each call; pathlib takes 7 times as long
    except OSError:
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
    _C_LIBRARY.fflush(None)


def no_breakpoint(*arguments: Any, **options: Any) -> None:
    """Raise RuntimeError with the way to use a debugger."""
    del arguments, options
    raise RuntimeError(
        "breakpoint() needs a terminal, and this process has none: use `raypipe run --local`, "
        "which runs everything in one process"
    )
