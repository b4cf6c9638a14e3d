"""Actor pool: tasks in long-lived actors that keep what they loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayTaskError

from raypipe.errors import FailureKind
from raypipe.graph.launcher import PoolOptions, TaskResult
from raypipe.launch.failures import is_node_gone
from raypipe.launch.nodes import living_nodes
from raypipe.launch.pool import RayPool
from raypipe.launch.process import TaskProcess


@dataclass(frozen=True)
class _Process:
    actor: Any
    node: Any  # reference to the node ID, ready once the actor has started


class ActorPool(RayPool):
    """Run tasks in sequence in as many actors as there is room for, started on demand.

    An actor takes its first task once it has started and the caller is in ``finished``. It holds
    its CPUs and GPUs between tasks, too.
    """

    def __init__(self, options: PoolOptions, *command: Any) -> None:
        super().__init__(options, *command)
        self._actor = ray.remote(TaskProcess).options(
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            resources={self._custom: options.cpus} if self._custom else None,
            runtime_env=self._ray_options["runtime_env"],
        )
        # only started actors get tasks: others may wait for resources for long
        self._starting: dict[Any, _Process] = {}
        self._idle: list[_Process] = []
        self._busy: dict[Any, _Process] = {}

    def submit(
        self, key: str, function: Callable[..., Any], *arguments: Any, cpus: float | None = None
    ) -> None:
        """Queue a task."""
        if cpus not in (None, self._options.cpus):
            raise ValueError(
                f"{key} asks for {cpus:g} CPUs of a pool that keeps its processes; "
                f"each has {self._options.cpus:g}"
            )
        super().submit(key, function, *arguments)

    def cancel(self) -> None:
        """Drop the queued tasks and end the actors."""
        for process in [*self._starting.values(), *self._idle, *self._busy.values()]:
            ray.kill(process.actor)
        for processes in (self._starting, self._idle, self._busy, self._running):
            processes.clear()
        super().cancel()

    def _watched(self) -> list[Any]:
        return [*self._running, *self._starting]

    def _launch(self) -> None:
        if self._control.holds_back(self, self._number()):
            while self._idle:
                ray.kill(self._idle.pop().actor)
            return
        most = int(self._capacity / self._options.cpus + 1e-9)
        while self._number() < min(most, len(self._running) + len(self._waiting)):
            actor: Any = self._actor.remote()
            process = _Process(actor, actor.node.remote())
            self._starting[process.node] = process
        while self._idle and self._waiting:
            process = self._idle.pop()
            self._busy[self._start_next(process.actor.run)] = process

    def _number(self) -> int:
        return len(self._starting) + len(self._idle) + len(self._busy)

    def _collect(self, reference: Any) -> TaskResult | None:
        if (process := self._starting.pop(reference, None)) is not None:
            return self._started(process)
        process, call = self._busy.pop(reference), self._ended(reference)
        try:
            result: TaskResult = ray.get(reference)
        except RayTaskError as error:
            result = self._rejected(call, error)
        except (OutOfMemoryError, RayActorError) as error:
            ray.kill(process.actor)  # Ray may only have lost contact with it
            return self._died(call, _kind(error, ray.get(process.node)), str(error))
        if result.error is not None and self._options.gpus:
            # some CUDA errors break the rest of the process
            ray.kill(process.actor)
        else:
            self._idle.append(process)
        return result

    def _started(self, process: _Process) -> TaskResult | None:
        """Add a started actor; if it died, charge the failure to the oldest queued task."""
        try:
            ray.get(process.node)
        except (OutOfMemoryError, RayActorError) as error:
            ray.kill(process.actor)
            if not self._waiting:
                return None
            return self._failed(self._waiting.popleft(), _kind(error), str(error))
        self._idle.append(process)
        return None


def _kind(error: Exception, node: str | None = None) -> FailureKind:
    """Return the kind of failure that ended an actor on ``node`` (None if unknown)."""
    if isinstance(error, OutOfMemoryError):
        return "host_out_of_memory"
    if node is None:
        return "worker_died"
    if isinstance(error, ActorUnavailableError):  # Ray has not noticed yet
        return "node_lost" if is_node_gone({node}) else "worker_died"
    return "worker_died" if node in living_nodes() else "node_lost"
