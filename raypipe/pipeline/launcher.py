"""Launcher protocol: training runs, trials and task pools, on Ray or in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raypipe.errors import FailureKind, UnitError

if TYPE_CHECKING:  # CPU tasks import this module, and torch takes seconds to import
    from raypipe.storage.run_directory import RunDirectory
    from raypipe.training.job import Report, TrainingJob

R = TypeVar("R")


@dataclass(frozen=True)
class TaskResult:
    """Outcome of a CPU task: a value, or an error with its kind.

    ``cpu_s`` is the CPU time of its process over all threads. ``started_at`` is the start, UTC in
    ISO 8601, by the clock of its node.
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


@dataclass(frozen=True)
class PoolOptions:
    """Options of all tasks of a pool.

    Args:
        cpus: CPUs, or a fraction of one, that a task takes at most.
        gpus: GPUs per task.
        time_limit_s: seconds after which an attempt is ended; None for no limit.
        attempts: attempts of a task whose worker dies or that exceeds the time limit.
        keep_processes: run tasks in actors that live as long as the pool. What one task loads (a
            model of several GB, kept with ``functools.cache`` in the experiment's code), the next
            task of that actor finds. The actors hold their GPU memory until the pool ends. All
            tasks then take the same CPUs.
        most_tasks: maximum number of concurrent tasks; None for as many as fit.

    """

    cpus: float = 1.0
    gpus: float = 0.0
    time_limit_s: float | None = None
    attempts: int = 3
    keep_processes: bool = False
    most_tasks: int | None = None


class TaskPool(Protocol):
    """Pool of fractional-CPU tasks: submit many, receive them as they finish."""

    @property
    def capacity(self) -> float:
        """The CPUs of all tasks that can run at the same time."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether another task would start now or next.

        A caller with very many tasks, or with a better order than first in, first out, submits only
        then.
        """
        ...

    def share(self, value: Any) -> Any:
        """Store a large argument where every task can read it; pass the returned value."""
        ...

    def submit(
        self, key: str, function: Callable[..., Any], *arguments: Any, cpus: float | None = None
    ) -> None:
        """Queue ``function(*arguments)`` on ``cpus``, by default the pool's, under ``key``."""
        ...

    def finished(self) -> list[TaskResult]:
        """Wait until at least one submitted task has ended; empty if none is pending.

        A task whose worker died comes with ``kind="worker_died"``. If it is retried, ``retried`` is
        set, and it comes again later.
        """
        ...


class Trials(Protocol):
    """Trials of a sweep, decided one at a time while others run."""

    def next(self) -> TrainingJob | None:
        """Return the next trial to start, or None while it depends on running trials."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether there are no further trials."""
        ...

    def history(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Return the logged steps of earlier trials by their id, for a new scheduler."""
        ...

    def report(self, trial_id: str, row: dict[str, Any]) -> None:
        """Record a logged step of a trial."""
        ...

    def ended(self, trial_id: str, outcome: dict[str, Any] | UnitError) -> None:
        """Record that a trial finished or failed."""
        ...

    def stopped(self, trial_id: str) -> None:
        """Record that the scheduler stopped a trial early."""
        ...


class Launcher(Protocol):
    """The place where stages run: a Ray cluster, or this process."""

    def on_every_node(self, function: Callable[[], R]) -> list[R]:
        """Call a function once on each node."""
        ...

    def train(self, job: TrainingJob, report: Report) -> dict[str, Any]:
        """Run a training job once, in new worker processes.

        Raises:
            UnitError: it failed, with the kind of failure.

        """
        ...

    def trials(self, trials: Trials, settings: Any, run_dir: RunDirectory) -> None:
        """Run the trials of a sweep (its section is ``settings``) as the cluster has room."""
        ...

    def pool(
        self, options: PoolOptions, say: Callable[[str], None] = print
    ) -> AbstractContextManager[TaskPool]:
        """Return a pool of CPU tasks; ``say`` receives what it waits for.

        Raises:
            ConfigError: no node has the resources of a task.

        """
        ...

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in threads that wait for tasks, trainings or trials."""
        ...

    def close(self) -> None:
        """Release the resources of this launcher."""
        ...
