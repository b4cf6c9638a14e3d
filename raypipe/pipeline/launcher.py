"""Launcher protocol: training runs, trials and task pools, on Ray or in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raypipe.errors import FailureKind, UnitError

if TYPE_CHECKING:  # a CPU task's process imports this module, and torch takes seconds
    from raypipe.storage.run_directory import RunDirectory
    from raypipe.training.job import Report, TrainingJob

R = TypeVar("R")


@dataclass(frozen=True)
class TaskResult:
    """How a CPU task ended: a value, or an error with its kind.

    ``cpu_s`` is the CPU time of its process, all threads together, ``started_at`` when it
    started, UTC in ISO 8601, by the clock of its node.
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
    """Options that all tasks of a pool share.

    Args:
        cpus: the share of a CPU, or CPUs, that a task takes at most.
        gpus: GPUs per task.
        time_limit_s: the seconds after which an attempt is ended; None for no limit.
        attempts: how often a task is tried whose process died or took too long.
        keep_processes: tasks run in processes of this pool's own, which live as long as the pool
            does: what one task loads (a model of several GB, kept with ``functools.cache`` in
            the experiment's code) the next one in that process finds. They end with the pool,
            and with them the GPU memory they hold. All tasks take the same share then.
        most_tasks: most tasks at the same time; None for as many as fit.

    """

    cpus: float = 1.0
    gpus: float = 0.0
    time_limit_s: float | None = None
    attempts: int = 3
    keep_processes: bool = False
    most_tasks: int | None = None


class TaskPool(Protocol):
    """Fractional-CPU tasks: submit many, take them as they finish."""

    @property
    def capacity(self) -> float:
        """The CPUs of all tasks that run at the same time."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether another task would start, or wait close behind those that run.

        Who has very many tasks, or knows better than first come, first served, submits only then.
        """
        ...

    def share(self, value: Any) -> Any:
        """Put a large argument where every task can read it; pass what this returns."""
        ...

    def submit(
        self, key: str, function: Callable[..., Any], *arguments: Any, cpus: float | None = None
    ) -> None:
        """Run ``function(*arguments)`` on ``cpus``, by default the most of the pool.

        Its result comes under ``key``.
        """
        ...

    def finished(self) -> list[TaskResult]:
        """Wait until at least one submitted task ended; empty if none is under way.

        A task whose process died comes with ``kind="worker_died"``; where it is tried again
        it comes with ``retried`` set, and once more when that ends.
        """
        ...


class Trials(Protocol):
    """The trials of a sweep, one after the other, decided while they run."""

    def next(self) -> TrainingJob | None:
        """Return the next trial to start, or None while it depends on running trials."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no further trial will come."""
        ...

    def history(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Return the logged steps of earlier trials by their id, for a new scheduler."""
        ...

    def report(self, trial_id: str, row: dict[str, Any]) -> None:
        """A logged step of a trial."""
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
        """Run a training job once, in fresh worker processes.

        Raises:
            UnitError: it failed, with the kind of failure.

        """
        ...

    def trials(self, trials: Trials, settings: Any, run_dir: RunDirectory) -> None:
        """Run the trials of a sweep (the section ``settings``) as the cluster has room."""
        ...

    def pool(
        self, options: PoolOptions, say: Callable[[str], None] = print
    ) -> AbstractContextManager[TaskPool]:
        """A pool of CPU tasks; ``say`` tells what it waits for.

        Raises:
            ConfigError: no node has as much as a task takes.

        """
        ...

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt where other threads wait for tasks, trainings or trials."""
        ...

    def close(self) -> None:
        """Give back what was started."""
        ...
