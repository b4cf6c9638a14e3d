"""CPU task: one function call with limited threads, in any process."""

from __future__ import annotations

import faulthandler
import os
import socket
import time
from bdb import BdbQuit
from collections.abc import Callable
from typing import Any

from threadpoolctl import threadpool_limits

from raypipe import faults
from raypipe.errors import FailureKind, Trace, UnitError, message_of, trace_of
from raypipe.pipeline.launcher import TaskResult
from raypipe.provenance import now

#: attribute of the SystemExit that Ray raises when it ends a worker by SIGTERM
_TERMINATED = "ray_terminate_msg"


def run_task(
    key: str,
    attempt: int,
    threads: int,
    time_limit_s: float | None,
    function: Callable[..., Any],
    *arguments: Any,
) -> TaskResult:
    """Run a function with limited math threads; an exception becomes the result.

    Workers are reused and keep their thread counts, so the limit is set for every task. At the time
    limit the process ends, whatever blocks it, and writes a stack trace to standard error.
    """
    if time_limit_s is not None:
        faulthandler.dump_traceback_later(time_limit_s, exit=True)
    try:
        faults.from_environment().at_task(key, attempt)
        return _run(key, attempt, threads, function, arguments)
    finally:
        if time_limit_s is not None:
            faulthandler.cancel_dump_traceback_later()


def _run(
    key: str,
    attempt: int,
    threads: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> TaskResult:
    kind: FailureKind | None
    trace: Trace | None
    value, message, kind, trace = None, None, None, None
    at, clock, cpu = now(), time.perf_counter(), time.process_time()
    try:
        with threadpool_limits(limits=threads):
            value = function(*arguments)
    except UnitError as error:
        message, kind, trace = error.message, error.kind, error.trace
    except BdbQuit:  # the user ended the debugger, and with it the command
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        if hasattr(error, _TERMINATED):
            raise
        message, trace = message_of(error), trace_of(error)
        kind = "host_out_of_memory" if isinstance(error, MemoryError) else "error"
    return TaskResult(
        key,
        value,
        message,
        kind,
        attempt,
        duration_s=time.perf_counter() - clock,
        cpu_s=time.process_time() - cpu,
        started_at=at,
        worker=f"{socket.gethostname()}:{os.getpid()}",
        trace=trace,
    )
