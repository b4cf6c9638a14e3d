"""Pools of tasks: fractions of CPUs on Ray, as Ray tasks or in actors that keep what they loaded.

Workers import this module, so it imports no torch, which takes seconds.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import ray
from ray import cloudpickle
from ray.exceptions import RayError, WorkerCrashedError

from raypipe.errors import TRANSIENT, ConfigError, FailureKind, Trace, UnitError
from raypipe.graph.launcher import Control, PoolOptions, TaskResult
from raypipe.launch import runtime_environment
from raypipe.launch.failures import kind_of
from raypipe.launch.nodes import TASKS, Wait, answers, bundle, living_nodes, room
from raypipe.launch.task import Shared, run_in_worker, take_remains, unpacked
from raypipe.redaction import printable

# oversubscription factor: keeps Ray's queue non-empty, so that CPUs never wait for the driver
_AHEAD, _AHEAD_OF_CHUNKS = 1.25, 2.0
# seconds that a chunk should take, its most calls, and how much longer than the last one it may be
_CHUNK_S, _MOST_CALLS, _GROWTH = 0.5, 1000, 8
# seconds of a chunk for each CPU: a Ray task costs this process a quarter of that
_TASK_S = 10e-3
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


class Call(NamedTuple):  # made in a fraction of the time of a dataclass
    """A queued or running call."""

    key: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cpus: float
    attempt: int = 1


@dataclass(frozen=True)
class CallChunk:
    """Calls that a Ray task runs in sequence, and the clock at its submission."""

    name: str
    calls: tuple[Call, ...]
    started: float

    @property
    def cpus(self) -> float:
        """The CPUs that it holds."""
        return self.calls[0].cpus


class TaskProcess:
    """Ray actor that runs tasks in sequence."""

    def ready(self) -> None:
        """Return once the actor has started."""

    def run(self, *arguments: Any) -> bytes:
        """Run a chunk of calls."""
        return run_in_worker(*arguments)


class RayPool:
    """Tasks on fractions of a CPU, submitted to Ray just ahead of free capacity.

    Slightly more tasks are in flight than the nodes can run, so that CPUs never wait and an
    autoscaler sees the demand. The limit follows nodes that join or leave.

    Short calls are sent in chunks of about half a second: a Ray task, which costs about a
    millisecond, runs several in sequence. How many follows from what the last ones took. On many
    CPUs a chunk takes four times as long as submitting a task for each of them: shorter ones would
    leave CPUs without work. Each call has its own result, attempts and time limit. If the process
    of a chunk dies, the call in which it died has failed, earlier ones have their results, and
    later ones start again.

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
        self._chunk_s = _CHUNK_S
        self._measured = 0.0
        self._measure()
        # by CPU share: preparing Ray's options takes as long as submitting a task
        self._remotes: dict[float, Any] = {}
        self._waiting: deque[Call] = deque()
        #: by reference, the chunk and the actor that runs it, if any
        self._running: dict[Any, tuple[CallChunk, Any]] = {}
        # of all waiting calls and running chunks; running totals, since there may be thousands
        self._waiting_cpus = self._running_cpus = 0.0
        #: calls of a chunk
        self._length = 1
        #: actors that run nothing: by the reference to their start, and those that have started
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []

    @property
    def has_room(self) -> bool:
        """Whether another task would start now or next."""
        is_begun = 0 < len(self._waiting) < self._length  # the next chunk, which is not full yet
        waiting = self._waiting_cpus / self._length
        return is_begun or self._running_cpus + waiting < self._limit() - 1e-9

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
        self._queue(Call(key, function, arguments, cpus or most))
        if not self._running or len(self._waiting) >= self._length:
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
            done = [result for reference in ready for result in self._collect(reference)]
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
        self._waiting_cpus = self._running_cpus = 0.0
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
        ahead = _AHEAD if self._length == 1 else _AHEAD_OF_CHUNKS
        return max(self.capacity * ahead, self.capacity + self._options.cpus)

    def _measure(self) -> None:
        """Count the capacity of the living nodes; without any, one task waits for the next node."""
        if time.monotonic() > self._measured + _MEASURE_S:
            slots, most = max(1, room(self._asked)), self._options.most_tasks
            self.capacity = min(slots, most or slots) * self._options.cpus
            self._chunk_s = max(_CHUNK_S, slots * _TASK_S)
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

    def _queue(self, call: Call, *, first: bool = False) -> None:
        """Queue a call, in front of all others or behind them."""
        self._waiting.appendleft(call) if first else self._waiting.append(call)
        self._waiting_cpus += call.cpus

    def _next_calls(self) -> tuple[Call, ...]:
        """Take the calls of the next chunk from the queue; a repeated one is alone."""
        calls = [self._waiting.popleft()]
        while (
            len(calls) < self._length
            and self._waiting
            and calls[0].attempt == self._waiting[0].attempt == 1
            and calls[0].cpus == self._waiting[0].cpus
        ):
            calls.append(self._waiting.popleft())
        waiting = self._waiting_cpus - len(calls) * calls[0].cpus
        self._waiting_cpus = round(waiting, 6) if self._waiting else 0.0
        return tuple(calls)

    def _start_next(self, remote: Any, actor: Any = None) -> None:
        """Start the oldest queued calls as a Ray task or an actor call of ``run_in_worker``."""
        calls = self._next_calls()
        chunk = CallChunk(f"{secrets.token_hex(8)}.raypipe", calls, time.monotonic())
        shared: dict[Any, Shared] = {}  # Ray replaces references that are arguments of the task
        for argument in (a for call in calls for a in call.arguments):
            if isinstance(argument, ray.ObjectRef):
                shared.setdefault(argument, Shared(len(shared)))
        sent = [
            (
                call.key,
                call.attempt,
                call.function,
                tuple(shared[a] if isinstance(a, ray.ObjectRef) else a for a in call.arguments),
            )
            for call in calls
        ]
        threads, limit_s = max(1, int(chunk.cpus)), self._options.time_limit_s
        reference = remote.remote(chunk.name, threads, limit_s, 2 * self._chunk_s, sent, *shared)
        self._running[reference] = chunk, actor
        self._running_cpus += chunk.cpus

    def _collect(self, reference: Any) -> list[TaskResult]:
        """Return the outcomes of a ready reference, which may end no attempt."""
        chunk, actor = self._running.pop(reference, (None, None))
        if chunk is None:
            actor = self._starting.pop(reference)
        else:  # remove the rounding errors of fractions
            self._running_cpus = round(self._running_cpus - chunk.cpus, 6)
        try:
            content = ray.get(reference)
        except RayError as error:
            if actor is not None:
                ray.kill(actor)  # Ray may only have lost contact with it
            if chunk is None and self._waiting:  # for which the actor was to start
                chunk = CallChunk("", self._next_calls(), time.monotonic())
            return [] if chunk is None else self._lost(chunk, error)
        results = [] if chunk is None else unpacked(content)
        if actor is not None and self._options.gpus and any(each.error for each in results):
            ray.kill(actor)  # some CUDA errors break the rest of the process
        elif actor is not None:
            self._idle.append(actor)
        if chunk is not None:
            self._put_back(chunk.calls[len(results) :])
            self._measure_calls(results)
        return results

    def _measure_calls(self, results: Sequence[TaskResult]) -> None:
        """Choose how many calls a chunk has, by what those of the last one took."""
        if self._options.gpus:  # an error of CUDA would fail the others
            return
        seconds = sum(result.duration_s for result in results) / len(results)
        wanted = int(min(self._chunk_s / max(seconds, 1e-9), _GROWTH * len(results)))
        self._length = max(1, min(wanted, _MOST_CALLS))

    def _put_back(self, calls: Sequence[Call]) -> None:
        """Queue calls that did not begin, in front of all others."""
        for call in reversed(calls):
            self._queue(call, first=True)

    def _lost(self, chunk: CallChunk, error: RayError) -> list[TaskResult]:
        """Return the results of a chunk whose process or node died, or that Ray failed.

        The call in which it died has failed. If nothing is known of it, it is the first one. Ray
        rejects arguments that a worker cannot read.
        """
        kind = kind_of(error)
        if kind is None:
            if len(chunk.calls) > 1:  # each alone: some may be all right
                self._put_back(chunk.calls)
                self._length = 1
                return []
            text = printable(str(error), keep="\n\t").strip()  # Ray's messages have colors
            trace = Trace(text)
            return [self._failed(chunk.calls[0], "error", text.rpartition("\n")[2], trace=trace)]
        if kind == "node_lost":
            self._put_back(chunk.calls[1:])
            return [self._failed(chunk.calls[0], kind, str(error))]
        results, started_at, output = _remains(chunk.name)
        call, *later = chunk.calls[len(results) :]
        self._put_back(later)
        message = _CRASHED if isinstance(error, WorkerCrashedError) else str(error)
        seconds = time.monotonic() - chunk.started  # with the time in Ray's queue
        if started_at is not None:
            seconds = (datetime.now(UTC) - datetime.fromisoformat(started_at)).total_seconds()
        limit = self._options.time_limit_s
        if kind == "worker_died" and limit is not None and seconds >= limit:
            kind, message = "timeout", f"took longer than its limit of {limit:g} s"
        elif fatal := _FATAL.findall(output):
            message = f"the worker process died: {fatal[-1]}"
        known = {"output": output, "started_at": started_at, "duration_s": max(0.0, seconds)}
        return [*results, self._failed(call, kind, message, **known)]

    def _failed(self, call: Call, kind: FailureKind, message: str, **known: Any) -> TaskResult:
        """Return the result of a failed attempt; queue the next one, if any."""
        again = kind in {*TRANSIENT, "timeout"} and call.attempt < self._options.attempts
        if again:
            self._queue(call._replace(attempt=call.attempt + 1), first=True)
        return TaskResult(call.key, None, message, kind, call.attempt, retried=again, **known)


def _remains(name: str) -> tuple[list[TaskResult], str | None, str]:
    """Return what a process left on any node that died in a chunk, as ``take_remains``."""
    found, nodes = [take_remains(name)], living_nodes()
    if found[0][1] is None and len(nodes) > 1:
        with suppress(RayError):
            found += answers(nodes, take_remains, name, timeout_s=_SEARCH_S, max_retries=0)
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
