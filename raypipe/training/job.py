"""The job that a training worker receives and the progress it reports. Picklable."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.errors import UnitError
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import Table
from raypipe.training import schedule
from raypipe.training.batching import BatchPlan
from raypipe.training.initial_weights import InitialWeights
from raypipe.training.oom import expandable_segments
from raypipe.training.settings import TrainStageSettings
from raypipe.training.tables import STEPS
from raypipe.training.task import JobTask

#: receives logged steps (rows) and messages to the user (text) during the run; not called for
#: every step
Report = Callable[[dict[str, Any] | str], None]


@dataclass(frozen=True)
class TrainingJob:
    """Description of a training run for its workers.

    ``plan`` is for the largest number of workers; a smaller group uses more accumulation steps.
    ``eval_batch`` is the number of samples per worker per forward pass of an evaluation. A
    ``measured`` run is a benchmark: it does not evaluate and keeps no checkpoint or model.
    ``identity`` is the hash of everything that decides the result except for the length and the
    schedule: only checkpoints with the same one are continued. A job that ``continues`` a finished
    training needs a checkpoint of it. ``initial`` are the weights to start from, if they are
    another run's.
    """

    trial_id: str
    run_id: str
    task: JobTask
    settings: TrainStageSettings
    plan: BatchPlan
    run_dir: RunDirectory
    steps_table: Table = STEPS
    attempt: int = 1
    eval_batch: int | None = None
    measured: bool = False
    until: int | None = None
    identity: str = ""
    continues: bool = False
    initial: InitialWeights | None = None

    @property
    def whole(self) -> int:
        """Number of optimizer steps of the whole training."""
        phases = self.task.phases(self.settings.training, self.plan.effective_batch)
        return sum(phase.steps for phase in phases)

    @property
    def stable_end(self) -> int | None:
        """Step whose checkpoint stays, because longer trainings go on from there; None if none."""
        training = self.settings.training
        if training.schedule != "warmup-stable-decay":  # phases may read the data
            return None
        phases = self.task.phases(training, self.plan.effective_batch)
        return schedule.stable_end(training, phases)

    @property
    def steps(self) -> int:
        """Step after which this run ends."""
        return self.whole if self.until is None else min(self.until, self.whole)

    def lone_worker(self) -> Worker:
        """Return the worker of a job that needs only one, on the process's GPU or on the CPU.

        Raises:
            UnitError: the job uses a GPU, and CUDA does not start.

        """
        if not self.settings.scaling.gpus_per_worker:
            return Worker(0, torch.device("cpu"))
        os.environ.update(expandable_segments())
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:
            reason = f"CUDA does not start: {error}; `raypipe doctor` shows the GPUs"
            raise UnitError(self.trial_id, "error", reason) from error
        return Worker(0, torch.device("cuda", 0))


@dataclass(frozen=True)
class Worker:
    """Rank of a worker in its group, and the device it trains on."""

    rank: int
    device: torch.device
    workers: int = 1
