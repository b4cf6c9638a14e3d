"""Inline launcher: all work in this process, without Ray, for tests and debugging."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raypipe.errors import UnitError
from raypipe.launch.task import run_task
from raypipe.pipeline.launcher import PoolOptions, R, TaskPool, TaskResult, Trials
from raypipe.storage.run_directory import RunDirectory
from raypipe.sweep.settings import SweepSettings
from raypipe.training.ending import Ending
from raypipe.training.job import Report, TrainingJob, Worker
from raypipe.training.loop import train
from raypipe.training.oom import unit_error


class InlineLauncher:
    """Launcher that runs everything in the calling thread, on the CPU, with one worker."""

    concurrent = False

    def __init__(self) -> None:
        self._interrupted = threading.Event()
        self._ending = Ending()

    def on_every_node(self, function: Callable[[], R]) -> list[R]:
        """Call the function here."""
        return [function()]

    def train(
        self,
        job: TrainingJob,
        report: Report,
        rank: float = 0.0,
        started: Callable[[], None] = lambda: None,
        seconds: float = math.inf,
    ) -> dict[str, Any]:
        """Run a training job in this process. Raises UnitError."""
        del rank, seconds
        started()
        if job.settings.scaling.fewest_workers != 1:
            raise ValueError(f"{job.trial_id}: in-process training supports one worker")
        try:
            worker = Worker(0, torch.device("cpu"))
            outcome = train(job, worker, self._unless_interrupted(report), self._ending)
        except Exception as error:
            raise unit_error(job.trial_id, error) from error
        if "ended_at" in outcome:
            raise KeyboardInterrupt
        return outcome

    def trials(
        self, trials: Trials, settings: SweepSettings, run_dir: RunDirectory, rank: float = 0.0
    ) -> None:
        """Run the trials in sequence; no scheduler ends one early."""
        del settings, run_dir, rank
        while (job := trials.next()) is not None:

            def report(row: dict[str, Any] | str, trial_id: str = job.trial_id) -> None:
                if not isinstance(row, str):
                    trials.report(trial_id, row)

            try:
                trials.ended(job.trial_id, self.train(job, report))
            except UnitError as error:
                trials.ended(job.trial_id, error)

    @contextmanager
    def pool(
        self,
        options: PoolOptions,
        say: Callable[[str], None] = print,
        rank: float = 0.0,
        seconds: float = math.inf,
    ) -> Iterator[TaskPool]:
        """Open a pool that runs each task in ``finished``, without a time limit."""
        del options, say, rank, seconds
        yield _InlinePool(self._is_ending)

    @property
    def ending_s(self) -> float:
        """The seconds that the end of the running training would take."""
        return self._ending.seconds

    @property
    def is_at_rest(self) -> bool:
        """False: the calling thread raises KeyboardInterrupt itself."""
        return False

    def wind_down(self) -> None:
        """Raise KeyboardInterrupt at the next task, or after the next step and a checkpoint."""
        self._ending.wanted = True

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt at the next task or logged step."""
        self._interrupted.set()

    def _is_ending(self) -> bool:
        return self._ending.wanted or self._interrupted.is_set()

    def close(self) -> None:
        """Do nothing: nothing was started."""

    def _unless_interrupted(self, report: Report) -> Report:
        def pass_on(row: dict[str, Any] | str) -> None:
            if self._interrupted.is_set():
                raise KeyboardInterrupt
            report(row)

        return pass_on


class _InlinePool:
    capacity = 1.0

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self._is_ending = is_ending
        self._waiting: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = []

    @property
    def has_room(self) -> bool:
        return not self._waiting

    def share(self, value: Any) -> Any:
        return value

    def submit(
        self, key: str, function: Callable[..., Any], *arguments: Any, cpus: float | None = None
    ) -> None:
        del cpus
        self._waiting.append((key, function, arguments))

    def finished(self) -> list[TaskResult]:
        if self._is_ending():
            raise KeyboardInterrupt
        if not self._waiting:
            return []
        key, function, arguments = self._waiting.pop(0)
        return [run_task(key, 1, 1, None, function, *arguments)]
