"""Redirection of what a process prints, also from C code and child processes, to files and logs."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe import redaction

if TYPE_CHECKING:
    from raypipe.training.job import TrainingJob

_STANDARD = (1, 2)  # standard output and standard error
#: seconds to wait until the output of a job is copied, and for the end of the copying process
_COPY_S, _END_S = 10.0, 0.1


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
