"""Fractional-CPU tasks on Ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from raypipe.launch.launcher import PoolOptions, TaskResult
from raypipe.launch.task import run_task

# so much more than the nodes hold is handed to Ray, so that no CPU waits for the driver
_AHEAD = 1.25
_POLL_S = 0.5
_WORTH_A_RETRY = ("worker_died", "node_lost", "host_out_of_memory", "timeout")


@dataclass(frozen=True)
class _Call:
    key: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cpus: float
    attempt: int = 1
    started: float = 0.0


class RayPool:
    """Tasks on shares of a CPU; only as many in flight as keep the nodes busy.

    Tasks without a GPU run on the CPUs that stages beside them leave.

    A task whose process died, or that took longer than its limit, is tried again, ``attempts``
    times in all; each death is handed out as a result of its own, so that it can be recorded.
    """

    def __init__(self, options: PoolOptions, shared: Shared) -> None:
        cpus, gpus = options.cpus, options.gpus
        slots = room(cpus, gpus)
        if not slots:
            largest = max(node.get("CPU", 0.0) for node in living_nodes().values())
            raise ConfigError(
                f"a task asks for {cpus:g} CPUs and {gpus:g} GPUs, and no node has that "
                f"(the largest has {largest:g} CPUs); ask for less"
            )
        self._options, self._shared = options, shared
        self._capacity = slots * cpus
        self._task = ray.remote(run_task)
        self._ray_options = {
            "num_gpus": gpus,
            "max_retries": 0,
            "runtime_env": fault_environment() or None,
        }
        self._waiting: deque[_Call] = deque()
        self._running: dict[Any, _Call] = {}

    @property
    def capacity(self) -> float:
        """The CPUs of all tasks that run at the same time."""
        return self._capacity

    @property
    def has_room(self) -> bool:
        """Whether another task would be handed to Ray at once."""
        return not self._waiting and self._in_flight() < self._limit() - 1e-9

    def share(self, value: Any) -> Any:
        """Put a value into the object store once; tasks receive the value itself."""
        return ray.put(value)

    def submit(
        self, key: str, function: Callable[..., Any], *arguments: Any, cpus: float | None = None
    ) -> None:
        """Queue a task."""
        largest = self._options.cpus
        if cpus is not None and not 0 < cpus <= largest:
            raise ValueError(f"{key} asks for {cpus:g} CPUs of a pool for at most {largest:g}")
        self._waiting.append(_Call(key, function, arguments, cpus or largest))
        self._launch()

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

    def _in_flight(self) -> float:
        return sum(call.cpus for call in self._running.values())

    def _limit(self) -> float:
        """The CPUs of what may be in flight: a little more than there are, one task at least."""
        left = None if self._options.gpus else self._shared.left()
        if left is None:
            return max(self._capacity * _AHEAD, self._capacity + self._options.cpus)
        # what is queued in Ray would take each CPU that is to become free
        return min(self._capacity, left)

    def _launch(self) -> None:
        limit, in_flight = self._limit(), self._in_flight()
        while self._waiting and in_flight + self._waiting[0].cpus <= limit + 1e-9:
            call = replace(self._waiting.popleft(), started=time.monotonic())
            in_flight += call.cpus
            reference = self._task.options(num_cpus=call.cpus, **self._ray_options).remote(
                call.key,
                call.attempt,
                max(1, int(call.cpus)),
                self._options.time_limit_s,
                call.function,
                *call.arguments,
            )
            self._running[reference] = call
        if not self._options.gpus:
            self._shared.use(self, in_flight)

    def _collect(self, reference: Any) -> TaskResult:
        call = self._running.pop(reference)
        limit = self._options.time_limit_s
        kind: FailureKind
        try:
            result: TaskResult = ray.get(reference)
        except OutOfMemoryError as error:
            kind, message = "host_out_of_memory", str(error)
        except NodeDiedError as error:
            kind, message = "node_lost", str(error)
        except WorkerCrashedError as error:
            kind, message = "worker_died", str(error)
            # run_task ends its process then
            if limit is not None and time.monotonic() - call.started >= limit:
                kind, message = "timeout", f"took longer than its limit of {limit:g} s"
        except (RayTaskError, TaskCancelledError) as error:
            kind, message = "error", str(error)
        else:
            return result
        again = kind in _WORTH_A_RETRY and call.attempt < self._options.attempts
        if again:
            self._waiting.appendleft(replace(call, attempt=call.attempt + 1))
        return TaskResult(call.key, None, message, kind, call.attempt, retried=again)
