"""Launcher protocol: training runs, sweeps and task pools, on Ray or in this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raypipe.errors import FailureKind, Trace

if TYPE_CHECKING:  # CPU tasks import this module, and torch takes seconds to import
    from raypipe.store.run_directory import RunDirectory
    from raypipe.training.job import Report, TrainingJob

R = TypeVar("R")


@dataclass(frozen=True)
class TaskResult:
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
