"""Pools of tasks: fractions of CPUs on Ray, as Ray tasks or in actors that keep what they loaded.

Workers import this module, so it imports no torch, which takes seconds.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError, WorkerCrashedError

from raypipe.errors import TRANSIENT, ConfigError, FailureKind, Trace, UnitError
from raypipe.graph.launcher import Control, PoolOptions, TaskResult
from raypipe.launch import runtime_environment
from raypipe.launch.failures import kind_of
from raypipe.launch.nodes import TASKS, Wait, answers, bundle, living_nodes, room
from raypipe.launch.task import run_in_worker, take_output
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
    name: str = ""
    started: float = 0.0


class TaskProcess:
    """Ray actor that runs tasks in sequence."""

    def ready(self) -> None:
        """Return once the actor has started."""

    def run(self, *arguments: Any) -> TaskResult:
        """Run a task."""
        return run_in_worker(*arguments)


class RayPool:
    """Tasks on fractions of a CPU, submitted to Ray just ahead of free capacity.

    Slightly more tasks are in flight than the nodes can run, so that CPUs never wait and an
    autoscaler sees the demand. The limit follows nodes that join or leave.

    A pool that keeps its processes runs tasks in sequence in as many actors as there is room for,
    started on demand. An actor takes its first task once it has started, which may take long, and
    the caller is in ``finished``. It holds its CPUs and GPUs between tasks, too.

    Each failed attempt is returned as a result, so that it can be recorded.

    Args:
        options: of all tasks.
        control: the command's.
        say: receives a message if the pool must wait for nodes.

    Raises:
        ConfigError: no node has the resources of a task.

    """

    def __init__(self, options: PoolOptions, control: Control, say: Callable[[str], None]) -> None:
        # with GPUs, a task takes CPUs of a node with GPUs
        has_tasks = any(TASKS in node for node in (*living_nodes().values(), *control.nodes))
        self._custom = TASKS if has_tasks and not options.gpus else None
        self._asked = bundle(options.cpus, options.gpus, self._custom)
        self._options, self._control = options, control
        self._wait = Wait(self._asked, 1, control.nodes, say)
        self._check_room()
        #: the CPUs of all tasks that can run at the same time
        self.capacity = 0.0
        self._measured = 0.0
        self._measure()
        # by CPU share: preparing Ray's options takes as long as submitting a task
        self._remotes: dict[float, Any] = {}
        self._waiting: deque[Call] = deque()
        #: by reference, the call and the actor that runs it, if any
        self._running: dict[Any, tuple[Call, Any]] = {}
        # of all running tasks; a running total, since there may be thousands
        self._running_cpus = 0.0
        #: actors that run nothing: by the reference to their start, and those that have started
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []

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
        most = self._options.cpus
        least = most if self._options.keep_processes else 1e-9
        if cpus is not None and not least <= cpus <= most:
            allowed = "each of its processes has" if least == most else "it allows at most"
            raise ValueError(f"{key} asks for {cpus:g} CPUs of a pool; {allowed} {most:g}")
        self._waiting.append(Call(key, function, arguments, cpus or most))
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
            if watched := [*self._running, *self._starting]:
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
        """Drop queued tasks, and end running ones and all actors."""
        actors = [*self._starting.values(), *self._idle]
        for reference, (_, actor) in self._running.items():
            if actor is None:
                ray.cancel(reference, force=True)
            else:
                actors.append(actor)
        for actor in actors:
            ray.kill(actor)
        for each in (self._waiting, self._running, self._starting, self._idle):
            each.clear()
        self._running_cpus = 0.0
        self._control.forget(self)

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
        self._measure()
        if self._options.gpus or self._options.most_tasks is not None:
            return self.capacity
        return max(self.capacity * _AHEAD, self.capacity + self._options.cpus)

    def _measure(self) -> None:
        """Count the capacity of the living nodes; without any, one task waits for the next node."""
        if time.monotonic() > self._measured + _MEASURE_S:
            slots, most = max(1, room(self._asked)), self._options.most_tasks
            self.capacity = min(slots, most or slots) * self._options.cpus
            self._measured = time.monotonic()

    def _launch(self) -> None:
        """Start queued calls for which there is capacity, or an actor."""
        if self._options.keep_processes:
            self._start_actors()
            while self._idle and self._waiting:
                actor = self._idle.pop()
                self._start_next(actor.run, actor)
            return
        limit = self._limit()
        while self._waiting and self._running_cpus + self._waiting[0].cpus <= limit + 1e-9:
            self._start_next(self._remote(self._waiting[0].cpus))

    def _start_actors(self) -> None:
        """Start actors for queued calls, or end idle ones to make room for a training."""
        number = len(self._starting) + len(self._idle) + len(self._running)
        if self._control.holds_back(self, number):
            while self._idle:
                ray.kill(self._idle.pop())
            return
        self._measure()
        most = int(self.capacity / self._options.cpus + 1e-9)
        for _ in range(min(most, len(self._running) + len(self._waiting)) - number):
            actor: Any = self._remote(self._options.cpus).remote()
            self._starting[actor.ready.remote()] = actor

    def _remote(self, cpus: float) -> Any:
        """Return the actor or task to start on a share of the CPUs."""
        if cpus not in self._remotes:
            options: dict[str, Any] = {
                "num_cpus": cpus,
                "num_gpus": self._options.gpus,
                "resources": {self._custom: cpus} if self._custom else None,
                "runtime_env": runtime_environment({}),
            }
            if self._options.keep_processes:
                self._remotes[cpus] = ray.remote(TaskProcess).options(**options)
            else:
                self._remotes[cpus] = ray.remote(run_in_worker).options(max_retries=0, **options)
        return self._remotes[cpus]

    def _start_next(self, remote: Any, actor: Any = None) -> None:
        """Start the oldest queued call as a Ray task or an actor call of ``run_in_worker``."""
        name = f"{secrets.token_hex(8)}.raypipe"
        call = replace(self._waiting.popleft(), name=name, started=time.monotonic())
        reference = remote.remote(
            call.name,
            call.key,
            call.attempt,
            max(1, int(call.cpus)),
            self._options.time_limit_s,
            call.function,
            *call.arguments,
        )
        self._running[reference] = call, actor
        self._running_cpus += call.cpus

    def _collect(self, reference: Any) -> TaskResult | None:
        """Return the outcome of a ready reference; None if it ends no attempt."""
        call, actor = self._running.pop(reference, (None, None))
        if call is None:
            actor = self._starting.pop(reference)
        else:  # remove the rounding errors of fractions
            self._running_cpus = round(self._running_cpus - call.cpus, 6)
        try:
            result: TaskResult | None = ray.get(reference)
        except RayError as error:
            if actor is not None and kind_of(error) is None:  # Ray's refusal of a value
                self._idle.append(actor)
            elif actor is not None:
                ray.kill(actor)  # Ray may only have lost contact with it
            if call is None and self._waiting:
                call = self._waiting.popleft()  # for which the actor was to start
            return None if call is None else self._lost(call, error)
        if actor is not None and result is not None and result.error and self._options.gpus:
            ray.kill(actor)  # some CUDA errors break the rest of the process
        elif actor is not None:
            self._idle.append(actor)
        return result

    def _lost(self, call: Call, error: RayError) -> TaskResult:
        """Return the result of an attempt without one: its process or node died, or Ray failed it.

        Ray rejects a value that it cannot send.
        """
        kind = kind_of(error)
        if kind is None:
            text = printable(str(error), keep="\n\t").strip()  # Ray's messages have colors
            return self._failed(call, "error", text.rpartition("\n")[2], trace=Trace(text))
        if kind == "node_lost":
            return self._failed(call, kind, str(error))
        message = _CRASHED if isinstance(error, WorkerCrashedError) else str(error)
        output, started_at = _left_output(call.name)
        seconds = time.monotonic() - call.started  # with the time in Ray's queue
        if started_at is not None:
            seconds = (datetime.now(UTC) - datetime.fromisoformat(started_at)).total_seconds()
        limit = self._options.time_limit_s
        if kind == "worker_died" and limit is not None and seconds >= limit:
            kind, message = "timeout", f"took longer than its limit of {limit:g} s"
        elif fatal := _FATAL.findall(output):
            message = f"the worker process died: {fatal[-1]}"
        known = {"output": output, "started_at": started_at, "duration_s": max(0.0, seconds)}
        return self._failed(call, kind, message, **known)

    def _failed(self, call: Call, kind: FailureKind, message: str, **known: Any) -> TaskResult:
        """Return the result of a failed attempt; queue the next one, if any."""
        again = kind in {*TRANSIENT, "timeout"} and call.attempt < self._options.attempts
        if again:
            self._waiting.appendleft(replace(call, attempt=call.attempt + 1))
        return TaskResult(call.key, None, message, kind, call.attempt, retried=again, **known)


def _left_output(name: str) -> tuple[str, str | None]:
    """Return what a task printed whose process died, and its start, as ``take_output``."""
    found, nodes = [take_output(name)], living_nodes()
    if found[0][1] is None and len(nodes) > 1:
        with suppress(RayError):
            found += answers(nodes, take_output, name, timeout_s=_SEARCH_S, max_retries=0)
    return max(found, key=lambda each: each[1] or "")


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
