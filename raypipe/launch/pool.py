"""Pools of tasks: fractions of CPUs on Ray, as Ray tasks or in actors that keep what they loaded.

Workers import this module, so it imports no torch, which takes seconds.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import TRANSIENT, ConfigError, FailureKind, Trace, UnitError
from raypipe.graph.launcher import PoolOptions, TaskResult
from raypipe.launch import fault_environment
from raypipe.launch.control import Control
from raypipe.launch.failures import is_node_gone, kind_of
from raypipe.launch.nodes import Resources, Wait, bundle, for_tasks, living_nodes, room
from raypipe.launch.output import run_captured, take_output
from raypipe.redaction import printable

# oversubscription factor: keeps Ray's queue non-empty, so that CPUs never wait for the driver
_AHEAD = 1.25
_POLL_S = 0.5
# seconds between capacity measurements: nodes come and go
_MEASURE_S = 2.0
# seconds to look for the output of a dead worker on other nodes
_SEARCH_S = 10.0
_CRASHED = (
    "the worker process died without an exception: a signal, os._exit or a crash outside of Python"
)
#: what Python or C says of a crash, in the output of the process
_FATAL = re.compile(r"^Fatal Python error: .*(?=\n)", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """A queued or running task."""

    key: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cpus: float
    attempt: int = 1
    started: float = 0.0


class RayPool:
    """Tasks on fractions of a CPU, submitted to Ray just ahead of free capacity.

    Slightly more tasks are in flight than the nodes can run, so that CPUs never wait and an
    autoscaler sees the demand. The limit follows nodes that join or leave.

    A task whose worker died or that exceeded its time limit is retried, with ``attempts`` attempts
    in all. Each failed attempt is returned as a result, so that it can be recorded.

    Args:
        options: of all tasks.
        control: the command's.
        before: the nodes at the start of the command.
        say: receives a message if the pool must wait for nodes.

    Raises:
        ConfigError: no node has the resources of a task.

    """

    def __init__(
        self,
        options: PoolOptions,
        control: Control,
        before: Collection[Resources],
        say: Callable[[str], None],
    ) -> None:
        # with GPUs, the CPUs beside them are not those of tasks
        self._custom = None if options.gpus else for_tasks() or for_tasks(before)
        self._asked = bundle(options.cpus, options.gpus, self._custom)
        self._name, self._options, self._control = secrets.token_hex(8), options, control
        self._wait = Wait(self._asked, 1, before, say)
        self._check_room()
        self._measured, self._capacity = 0.0, 0.0
        self._measure()
        self._ray_options = {
            "num_gpus": options.gpus,
            "max_retries": 0,
            "runtime_env": fault_environment() or None,
        }
        # by CPU share: preparing Ray's options takes as long as submitting a task
        self._tasks: dict[float, Any] = {}
        self._waiting: deque[Call] = deque()
        self._running: dict[Any, Call] = {}
        # of all running tasks; a running total, since there may be thousands
        self._running_cpus = 0.0

    @property
    def capacity(self) -> float:
        """The CPUs of all tasks that can run at the same time."""
        return self._capacity

    @property
    def has_room(self) -> bool:
        """Whether another task would start now or next."""
        waiting = sum(call.cpus for call in self._waiting)
        return self._running_cpus + waiting < self._limit() - 1e-9

    def share(self, value: Any) -> Any:
        """Put a value into the object store once; tasks receive the value."""
        return ray.put(value)

    def submit(
        self, key: str, function: Callable[..., Any], *arguments: Any, cpus: float | None = None
    ) -> None:
        """Queue a task."""
        largest = self._options.cpus
        if cpus is not None and not 0 < cpus <= largest:
            raise ValueError(f"{key} asks for {cpus:g} CPUs; the pool allows at most {largest:g}")
        self._waiting.append(Call(key, function, arguments, cpus or largest))
        self._launch()

    def finished(self) -> list[TaskResult]:
        """Wait for at least one task; empty if none is queued or running.

        Raises:
            KeyboardInterrupt: the run is interrupted.

        """
        self._launch()
        while self._running or self._waiting:
            if self._control.is_winding_down and not self._running:
                self._control.await_end(self)
            ready: list[Any] = []
            if watched := self._watched():
                # all ready references: each wait takes longer the more are watched
                ready, _ = ray.wait(watched, num_returns=len(watched), timeout=0)
                if not ready:
                    ready, _ = ray.wait(watched, num_returns=1, timeout=_POLL_S)
            # if nothing is in flight, wait here for capacity
            self._control.pause(0 if watched else _POLL_S)
            if not ready:
                self._check_room()
            done = [result for reference in ready if (result := self._collect(reference))]
            self._launch()
            if done:
                return done
        return []

    def cancel(self) -> None:
        """Drop queued tasks and end running ones."""
        self._waiting.clear()
        for reference in self._running:
            ray.cancel(reference, force=True)
        self._running.clear()
        self._running_cpus = 0.0
        self._control.close(self)

    def _watched(self) -> list[Any]:
        return list(self._running)

    def _check_room(self) -> None:
        """Raise an error if no node has the resources of a task, and waiting for one is vain."""
        if not self._wait.is_vain("pool"):
            return
        cpus, gpus = self._options.cpus, self._options.gpus
        largest = max(node.get("CPU", 0.0) for node in living_nodes().values())
        reason = (
            f"a task asks for {cpus:g} CPUs and {gpus:g} GPUs, and no node has that "
            f"(the largest has {largest:g} CPUs); ask for less"
        )
        raise UnitError("pool", "node_lost", reason) if self._wait.fitted else ConfigError(reason)

    def _limit(self) -> float:
        """Return the CPUs that may be in flight: slightly over capacity, at least one task."""
        if self._control.holds_back(self, len(self._running)):
            return self._running_cpus
        if time.monotonic() > self._measured + _MEASURE_S:
            self._measure()
        if self._options.gpus or self._options.most_tasks is not None:
            return self._capacity
        return max(self._capacity * _AHEAD, self._capacity + self._options.cpus)

    def _measure(self) -> None:
        """Count the capacity of the living nodes; without any, one task waits for the next node."""
        slots, most = max(1, room(self._asked)), self._options.most_tasks
        self._capacity = min(slots, most or slots) * self._options.cpus
        self._measured = time.monotonic()

    def _launch(self) -> None:
        limit = self._limit()
        while self._waiting and self._running_cpus + self._waiting[0].cpus <= limit + 1e-9:
            self._start_next(self._task(self._waiting[0].cpus))

    def _task(self, cpus: float) -> Any:
        if cpus not in self._tasks:
            custom = {self._custom: cpus} if self._custom else None
            self._tasks[cpus] = ray.remote(run_captured).options(
                num_cpus=cpus, resources=custom, **self._ray_options
            )
        return self._tasks[cpus]

    def _start_next(self, remote: Any) -> Any:
        """Start the oldest queued call as a Ray task or an actor call of ``run_captured``."""
        call = replace(self._waiting.popleft(), started=time.monotonic())
        reference = remote.remote(
            self._name,
            call.key,
            call.attempt,
            max(1, int(call.cpus)),
            self._options.time_limit_s,
            call.function,
            *call.arguments,
        )
        self._running[reference] = call
        self._running_cpus += call.cpus
        return reference

    def _ended(self, reference: Any) -> Call:
        """Return the call of a ready reference, which no longer runs."""
        call = self._running.pop(reference)
        # remove the rounding errors of fractions
        self._running_cpus = round(self._running_cpus - call.cpus, 6)
        return call

    def _collect(self, reference: Any) -> TaskResult | None:
        """Return the outcome of a ready reference; None if it ends no attempt."""
        call = self._ended(reference)
        try:
            result: TaskResult = ray.get(reference)
        except RayError as error:
            return self._lost(call, error)
        return result

    def _lost(self, call: Call, error: RayError) -> TaskResult:
        """Return the result of an attempt without one: its process or node died, or Ray failed it.

        Ray rejects a value that it cannot send.
        """
        kind = kind_of(error)
        if kind is None:
            text = printable(str(error), keep="\n\t").strip()  # Ray's messages have colors
            failed = self._failed(call, "error", text.rpartition("\n")[2])
            return replace(failed, trace=Trace(text))
        if kind == "node_lost":
            return self._failed(call, kind, str(error))
        message = _CRASHED if isinstance(error, WorkerCrashedError) else str(error)
        output, started_at = self._left_output(call)
        seconds = time.monotonic() - call.started  # with the time in Ray's queue
        if started_at is not None:
            seconds = (datetime.now(UTC) - datetime.fromisoformat(started_at)).total_seconds()
        limit = self._options.time_limit_s
        if kind == "worker_died" and limit is not None and seconds >= limit:
            kind, message = "timeout", f"took longer than its limit of {limit:g} s"
        elif fatal := _FATAL.findall(output):
            message = f"the worker process died: {fatal[-1]}"
        failed = self._failed(call, kind, message)
        return replace(failed, output=output, started_at=started_at, duration_s=max(0.0, seconds))

    def _left_output(self, call: Call) -> tuple[str, str | None]:
        """Return what a task printed whose process died, and its start, as ``take_output``."""
        task = self._name, call.key, call.attempt
        found, nodes = take_output(*task), living_nodes()
        if found[1] is not None or len(nodes) <= 1:
            return found
        look = ray.remote(num_cpus=0, max_retries=0)(take_output)
        pinned = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        looks = [look.options(scheduling_strategy=node).remote(*task) for node in pinned]
        ready, _ = ray.wait(looks, num_returns=len(looks), timeout=_SEARCH_S)
        for answer in ready:
            with suppress(ray.exceptions.RayError):  # its node was lost
                found = max(found, ray.get(answer), key=lambda each: each[1] or "")
        return found

    def _failed(self, call: Call, kind: FailureKind, message: str) -> TaskResult:
        """Return the result of a failed attempt; queue a retry if the failure is transient."""
        again = kind in {*TRANSIENT, "timeout"} and call.attempt < self._options.attempts
        if again:
            self._waiting.appendleft(replace(call, attempt=call.attempt + 1))
        return TaskResult(call.key, None, message, kind, call.attempt, retried=again)


class TaskProcess:
    """Ray actor that runs tasks in sequence."""

    def node(self) -> str:
        """Return the ID of the actor's node."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, *arguments: Any) -> TaskResult:
        """Run a task and capture its output."""
        return run_captured(*arguments)


@dataclass(frozen=True)
class _Process:
    actor: Any
    node: Any  # reference to the node ID, ready once the actor has started


class KeptPool(RayPool):
    """Run tasks in sequence in as many actors as there is room for, started on demand.

    An actor takes its first task once it has started, which may take long, and the caller is in
    ``finished``. It holds its CPUs and GPUs between tasks, too.
    """

    def __init__(self, options: PoolOptions, *command: Any) -> None:
        super().__init__(options, *command)
        self._actor = ray.remote(TaskProcess).options(
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            resources={self._custom: options.cpus} if self._custom else None,
            runtime_env=self._ray_options["runtime_env"],
        )
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
        self._running.clear()
        super().cancel()

    def _watched(self) -> list[Any]:
        return [*self._running, *self._starting]

    def _launch(self) -> None:
        number = len(self._starting) + len(self._idle) + len(self._busy)
        if self._control.holds_back(self, number):
            while self._idle:
                ray.kill(self._idle.pop().actor)
            return
        wanted = len(self._running) + len(self._waiting)
        for _ in range(min(int(self._capacity / self._options.cpus + 1e-9), wanted) - number):
            actor: Any = self._actor.remote()
            process = _Process(actor, actor.node.remote())
            self._starting[process.node] = process
        while self._idle and self._waiting:
            process = self._idle.pop()
            self._busy[self._start_next(process.actor.run)] = process

    def _collect(self, reference: Any) -> TaskResult | None:
        starting = self._starting.pop(reference, None)
        process = starting or self._busy.pop(reference)
        call = None if starting else self._ended(reference)
        try:
            result = ray.get(reference)
        except RayError as error:
            if not isinstance(error, RayActorError) and kind_of(error) is None:  # Ray's refusal
                self._idle.append(process)
            else:
                ray.kill(process.actor)  # Ray may only have lost contact with it
                if call is not None and _is_lost(error, ray.get(process.node)):
                    return self._failed(call, "node_lost", str(error))
            if call is None:  # a process that cannot start is a failure of the next task
                call = self._waiting.popleft() if self._waiting else None
            return self._lost(call, error) if call is not None else None
        if call is None:
            self._idle.append(process)
            return None
        if result.error is not None and self._options.gpus:
            ray.kill(process.actor)  # some CUDA errors break the rest of the process
        else:
            self._idle.append(process)
        return result  # type: ignore[no-any-return]


def _is_lost(error: RayError, node: str) -> bool:
    """Whether the node of an actor that died is gone, or will be found to be."""
    if isinstance(error, ActorUnavailableError):  # Ray has not noticed yet
        return is_node_gone({node})
    return isinstance(error, RayActorError) and node not in living_nodes()


def obstacle(function: Any, used: Mapping[str, Any]) -> str:
    """Return why a function cannot be sent to workers; empty if it can.

    Args:
        function: the function.
        used: the global and enclosed variables that it uses, by name.

    """
    if not (reason := _refusal(function)):
        return ""
    for name, value in used.items():
        if _refusal(value):
            return (
                f"it uses the variable {name!r}, a {type(value).__name__}, which cannot be sent to "
                f"workers; create it inside the function ({reason})"
            )
    return f"it cannot be sent to workers ({reason}); move it into a module"


def _refusal(value: Any) -> str:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # objects raise anything when they are pickled
        return f"{type(error).__name__}: {error}"
    return ""
