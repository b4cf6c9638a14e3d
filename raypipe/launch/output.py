"""Output of tasks and of training workers, also of C code and of child processes.

What a task prints goes to a file next to Ray's logs, and is returned with its result. If its
process died, the file remains there. What a training worker prints goes to its log. Like all that
tasks import, this module imports no torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from raypipe import redaction
from raypipe.graph.launcher import TaskResult
from raypipe.launch.task import run_guarded
from raypipe.provenance import now

if TYPE_CHECKING:
    from raypipe.training.job import TrainingJob

#: bytes of the beginning and of the end of a task's output
_HEAD, _TAIL = 16 * 1024, 48 * 1024
_STANDARD = (1, 2)  # standard output and standard error
#: seconds to wait until the output of a job is copied, and for the end of the copying process
_COPY_S, _END_S = 10.0, 0.1


def run_captured(pool: str, key: str, attempt: int, *arguments: Any) -> TaskResult:
    """Run a task with ``run_guarded`` in a worker, and return what it printed with its result.

    ``pool`` is a unique name: tasks of other pools and commands may have the same key.
    """
    if (folder := _folder()) is None:
        return run_guarded(key, attempt, *arguments)
    path = _path(folder, pool, key, attempt)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        begin = os.write(file, f"{now()}\n".encode())
        with redirected(file):
            result = run_guarded(key, attempt, *arguments)
        text = _bounded(file, begin)
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
    return replace(result, output=text) if text else result


def take_output(pool: str, key: str, attempt: int) -> tuple[str, str | None]:
    """Return and remove the output of a dead process that ran a task of a pool on this node.

    Returns:
        The output, and the start of the task as in ``TaskResult``; None if nothing is found.

    """
    path = _path(_folder() or Path("/nonexistent"), pool, key, attempt)
    with suppress(OSError), path.open("rb") as file:
        path.unlink()
        start = file.readline()
        return _bounded(file.fileno(), len(start)), start.decode().strip() or None
    return "", None


def _path(folder: Path, pool: str, key: str, attempt: int) -> Path:
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:16]
    return folder / f"{pool}-{digest}-{attempt}.raypipe"


@cache
def _folder() -> Path | None:
    """Return the folder of Ray's logs on this node; None if it is not known."""
    context = ray.get_runtime_context()
    try:
        folder = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    except (AttributeError, RuntimeError):  # an earlier Ray, or a client of a cluster
        return None
    return folder if folder.is_dir() else None


def _bounded(file: int, begin: int) -> str:
    """Return a file's text from a position on, without its middle if it is long."""
    size = os.fstat(file).st_size
    if size - begin <= _HEAD + _TAIL:
        return os.pread(file, size - begin, begin).decode(errors="replace")
    head = os.pread(file, _HEAD, begin).decode(errors="replace")
    tail = os.pread(file, _TAIL, size - _TAIL).decode(errors="replace")
    left_out = size - begin - _HEAD - _TAIL
    return f"{head}\n... {left_out} bytes left out ...\n{tail}"


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


def no_breakpoint(*arguments: Any, **options: Any) -> None:
    """Raise RuntimeError with the way to use a debugger."""
    del arguments, options
    raise RuntimeError(
        "breakpoint() needs a terminal, and this process has none: use `raypipe run --local`, "
        "which runs everything in one process"
    )


@contextmanager
def logged(job: TrainingJob, rank: int) -> Iterator[None]:
    """Write what this process prints and logs to the log of a training, which only then exists.

    Credentials are redacted before anything is written. On an object store the log is written at
    the end of the job.
    """
    path = job.run_dir.log(job.trial_id if rank == 0 else f"{job.trial_id}-{rank}")
    local = job.run_dir.is_local
    if local:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("ab") if local else tempfile.TemporaryFile() as log:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
        try:
            with _redacted(log.fileno()) as file, redirected(file):
                yield
        finally:
            size = os.fstat(log.fileno()).st_size
            if local and not size:
                Path(path).unlink(missing_ok=True)
            elif size and not local:
                earlier = job.run_dir.read(path) if job.run_dir.exists(path) else b""
                job.run_dir.write(path, earlier + os.pread(log.fileno(), size, 0))


@contextmanager
def _redacted(file: int) -> Iterator[int]:
    """Yield a descriptor; what is written to it arrives in the file without credentials.

    Another process copies it, so that the last words of a dying process arrive, too.
    """
    own, control = socket.socketpair()
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", redaction.__file__, str(control.fileno())]
    process = subprocess.Popen(
        command, stdin=reading, stdout=file, pass_fds=[control.fileno()], start_new_session=True
    )
    os.close(reading)
    control.close()
    try:
        yield writing
    finally:
        os.close(writing)
        own.settimeout(_COPY_S)
        with own, suppress(OSError):
            own.shutdown(socket.SHUT_WR)
            own.recv(1)  # returns when everything is copied
        with suppress(subprocess.TimeoutExpired):  # else a process that the job started goes on
            process.wait(_END_S)
