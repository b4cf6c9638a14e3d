"""Fractional-CPU tasks on Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

from raypipe.errors import ConfigError, FailureKind
from raypipe.launch import fault_environment
from raypipe.launch.capacity import Shared, living_nodes, room
from raypipe.launch.launcher import TaskResult
from raypipe.launch.task import run_task

_MAX_ATTEMPTS = 3
# enough queued behind the running ones that no slot waits for the driver
_QUEUED_PER_SLOT = 2
_POLL_S = 0.5
_WORTH_A_RETRY = ("worker_died", "node_lost", "host_out_of_memory")

Call = tuple[str, Callable[..., Any], tuple[Any, ...], int]


class RayPool:
    """Tasks that ask for ``cpus`` of a CPU each; only as many in flight as keep it busy.

    Tasks without a GPU run on the CPUs that stages beside them leave.

    A task whose process died is tried again ``_MAX_ATTEMPTS`` times in all; each death is
    handed out as a result of its own, so that it can be recorded.
    """

    def __init__(self, cpus: float, gpus: float, shared: Shared) -> None:
        self._slots = room(cpus, gpus)
        if not self._slots:
            largest = max(node.get("CPU", 0.0) for node in living_nodes().values())
            raise ConfigError(
                f"a task asks for {cpus:g} CPUs and {gpus:g} GPUs, and no node has that "
                f"(the largest has {largest:g} CPUs); ask for less"
            )
        self._cpus, self._gpus, self._shared = cpus, gpus, shared
        self._threads = max(1, int(cpus))
        self._task = ray.remote(run_task).options(
            num_cpus=cpus, num_gpus=gpus, max_retries=0, runtime_env=fault_environment() or None
        )
        self._waiting: deque[Call] = deque()
        self._running: dict[Any, Call] = {}

    @property
    def slots(self) -> int:
        """How many tasks run at the same time."""
        return self._slots

    def share(self, value: Any) -> Any:
        """Put a value into the object store once; tasks receive the value itself."""
        return ray.put(value)

    def submit(self, key: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Queue a task."""
        self._waiting.append((key, function, arguments, 1))

    def finished(self) -> list[TaskResult]:
        """Wait for at least one task; empty if none is queued or running.

        Raises:
            KeyboardInterrupt: the run is interrupted.

        """
        self._launch()
        while self._running or self._waiting:
            ready: list[Any] = []
            if self._running:
                ready, _ = ray.wait(list(self._running), num_returns=1, timeout=_POLL_S)
            # where nothing may run now, what waits does so here
            self._shared.pause(0 if self._running else _POLL_S)
            if ready:
                more, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
                done = [self._collect(reference) for reference in dict.fromkeys([*ready, *more])]
                self._launch()
                return done
            self._launch()
        return []

    def cancel(self) -> None:
        """Drop what waits and end what runs."""
        self._waiting.clear()
        for reference in self._running:
            ray.cancel(reference, force=True)
        self._running.clear()
        self._shared.release(self)

    def _launch(self) -> None:
        limit = self._slots * _QUEUED_PER_SLOT
        left = None if self._gpus else self._shared.left()
        if left is not None:  # what is queued in Ray would take each CPU that is to become free
            limit = min(self._slots, int(left / self._cpus + 1e-9))
        while self._waiting and len(self._running) < limit:
            call = self._waiting.popleft()
            key, function, arguments, attempt = call
            reference = self._task.remote(key, attempt, self._threads, function, *arguments)
            self._running[reference] = call
        if not self._gpus:
            self._shared.use(self, len(self._running) * self._cpus)

    def _collect(self, reference: Any) -> TaskResult:
        key, function, arguments, attempt = self._running.pop(reference)
        kind: FailureKind
        try:
            result: TaskResult = ray.get(reference)
        except OutOfMemoryError as error:
            kind, message = "host_out_of_memory", str(error)
        except NodeDiedError as error:
            kind, message = "node_lost", str(error)
        except WorkerCrashedError as error:
            kind, message = "worker_died", str(error)
        except (RayTaskError, TaskCancelledError) as error:
            kind, message = "error", str(error)
        else:
            return result
        if kind in _WORTH_A_RETRY and attempt < _MAX_ATTEMPTS:
            self._waiting.appendleft((key, function, arguments, attempt + 1))
            return TaskResult(key, error=message, kind=kind, attempt=attempt, retried=True)
        return TaskResult(key, error=message, kind=kind, attempt=attempt)
