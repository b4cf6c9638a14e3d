"""Launcher protocol: trainings, sweeps and task pools, on Ray or in this process; their control."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar

from raypipe.errors import FailureKind, Trace, UnitError

if TYPE_CHECKING:  # CPU tasks import this module, and torch takes seconds to import
    from raypipe.store.run_directory import RunDirectory
    from raypipe.training.job import Report, TrainingJob

R = TypeVar("R")

#: seconds that Ray may take to start one worker, or a group of them, on free resources
_ONE_S, _GROUP_S = 3.0, 60.0


class TaskResult(NamedTuple):  # sent in half the bytes of a dataclass
    """Outcome of a CPU task: a value, or an error with its kind.

    ``cpu_s`` is the CPU time of its process over all threads. ``started_at`` is the start, UTC in
    ISO 8601, by the clock of its node. ``trace`` is that of an exception. ``output`` is what the
    task printed, also if its worker died; long output lacks its middle.
    """

    key: str
    value: Any = None
    error: str | None = None
    kind: FailureKind | None = None
    attempt: int = 1
    duration_s: float = 0.0
    cpu_s: float = 0.0
    started_at: str | None = None
    worker: str = ""
    retried: bool = False
    trace: Trace | None = None
    output: str = ""


@dataclass(frozen=True)
class PoolOptions:
    """Options of all tasks of a pool.

    Args:
        cpus: maximum number of CPUs per task; may be a fraction.
        gpus: GPUs per task.
        time_limit_s: seconds after which an attempt is ended; None for no limit.
        attempts: maximum number of attempts, if the worker dies or the task exceeds the limit.
        keep_processes: run tasks in actors that live as long as the pool. Later tasks of
            an actor reuse what earlier ones cached, such as a model kept with ``functools.cache``
            in the experiment's code. Actors hold their GPU memory until the pool ends. All tasks
            then take the same CPUs.
        most_tasks: maximum number of concurrent tasks; None for as many as fit.

    """

    cpus: float = 1.0
    gpus: float = 0.0
    time_limit_s: float | None = None
    attempts: int = 3
    keep_processes: bool = False
    most_tasks: int | None = None


class TaskPool(Protocol):
    """Pool of fractional-CPU tasks: submit many, receive them as they finish.

    ``capacity`` is the CPUs of all tasks that can run at the same time.
    """

    capacity: float

    @property
    def has_room(self) -> bool:
        """Whether another task would start now or next.

        Callers with very many tasks, or with priorities of tasks, submit only while it is true.
        """

    def share(self, value: Any) -> Any:
        """Store a large argument where every task can read it; pass the returned value."""

    def submit(
        self, key: str, function: Callable[..., Any], *arguments: Any, cpus: float | None = None
    ) -> None:
        """Queue ``function(*arguments)`` on ``cpus``, by default the pool's, under ``key``."""

    def finished(self) -> list[TaskResult]:
        """Return tasks that ended, after waiting for at least one; empty if none is pending.

        A failed attempt has ``error`` and ``kind`` set. If ``retried`` is set too, another result
        of the same task follows.
        """


class Launcher(Protocol):
    """Backend that runs the work of stages: a Ray cluster, or this process.

    ``concurrent`` says whether several stages may call it at the same time.
    """

    concurrent: bool

    def on_every_node(self, function: Callable[[], R]) -> list[R]:
        """Call a function once on each node."""

    def train(
        self, job: TrainingJob, report: Report, started: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Run a training job once; ``started`` is called when its resources are free.

        Raises:
            UnitError: it failed, with the kind of failure.

        """

    def trials(self, sweep: Any, run_dir: RunDirectory) -> None:
        """Run the trials of a :class:`~raypipe.study.sweep.Sweep` as the cluster has room."""

    def pool(
        self, options: PoolOptions, say: Callable[[str], None] = print
    ) -> AbstractContextManager[TaskPool]:
        """Return a pool of tasks; ``say`` receives a message if it must wait for nodes.

        Raises:
            ConfigError: no node has the resources of a task.

        """

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing runs any more, so that an interruption loses nothing."""

    def wind_down(self) -> None:
        """Start nothing new; trainings save checkpoints and end, and tasks end as they are.

        Threads that wait then raise KeyboardInterrupt, at the latest after ``interrupt``.
        """

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in threads that wait for tasks, trainings or trials."""

    def close(self) -> None:
        """Release the resources of this launcher."""


class Control:
    """Control of the running work of a command: its end, and the order of trainings and tasks.

    Ray gives free CPUs to the next small task even while something larger waits for more of them,
    so tasks make room for trainings here. ``nodes`` are the resources of the nodes at the start.
    """

    def __init__(self) -> None:
        self.nodes: Sequence[Mapping[str, float]] = ()
        self._interrupted, self._lost = threading.Event(), ""
        self._winding_down = threading.Event()
        self._active: set[object] = set()
        # trainings that wait for resources, and those of them that tasks do not hold up
        self._waiting: dict[object, float] = {}
        self._passed: set[object] = set()
        # running tasks of each pool; when a task last ran, or no training waited
        self._running: dict[object, int] = {}
        self._busy_at = time.monotonic()
        self._lock = threading.Lock()

    @contextmanager
    def working(self) -> Iterator[object]:
        """Count the body as running work; yield its name for ``await_end``."""
        work = object()
        self._active.add(work)
        try:
            yield work
        finally:
            self._active.discard(work)

    def place(self, training: object, workers: int) -> None:
        """Let tasks make room for a training, until it is ``placed``."""
        with self._lock:
            self._waiting[training] = _ONE_S if workers == 1 else _GROUP_S
            self._busy_at = time.monotonic()

    def placed(self, training: object) -> None:
        """Record that a training has its resources, or needs none any more."""
        with self._lock:
            self._waiting.pop(training, None)

    def ended(self, training: object) -> None:
        """Record that a training has ended: those that wait may have room now."""
        self.placed(training)
        self._passed.clear()

    def holds_back(self, pool: object, running: int) -> bool:
        """Whether a pool with this number of running tasks should start no further one now.

        Once all pools are idle, and a training still has no room, something else holds it up.
        """
        with self._lock:
            self._running[pool], now = running, time.monotonic()
            waiting = self._waiting.keys() - self._passed
            if any(self._running.values()) or not waiting:
                self._busy_at = now
            idle_s = now - self._busy_at
            self._passed |= {each for each in waiting if idle_s > self._waiting[each]}
            return self.is_winding_down or bool(waiting - self._passed)

    def forget(self, pool: object) -> None:
        """Forget a pool."""
        with self._lock:
            self._running.pop(pool, None)

    @property
    def is_winding_down(self) -> bool:
        """Whether work comes to an orderly end, and nothing new starts."""
        return self._winding_down.is_set()

    def wind_down(self) -> None:
        """Start nothing new; trainings save checkpoints and end."""
        self._winding_down.set()

    @property
    def is_at_rest(self) -> bool:
        """Whether all work has ended."""
        return not self._active

    def await_end(self, work: object) -> NoReturn:
        """Record that a piece of work has ended early; raise KeyboardInterrupt in the end."""
        self._active.discard(work)
        while True:
            self.pause(0.5)

    def interrupt(self, lost: str = "") -> None:
        """Raise KeyboardInterrupt in every current and later ``pause``.

        It is a UnitError if Ray is ``lost``, with this message.
        """
        self._lost = lost
        self._interrupted.set()

    def pause(self, seconds: float = 0) -> None:
        """Sleep. Raises KeyboardInterrupt, or UnitError, after ``interrupt``."""
        if self._interrupted.wait(seconds):
            raise UnitError("ray", "node_lost", self._lost) if self._lost else KeyboardInterrupt
