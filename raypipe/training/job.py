"""What a training run is told, and what it tells: plain values between processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import Table
from raypipe.training.batching import BatchPlan
from raypipe.training.settings import TrainStageSettings
from raypipe.training.tables import STEPS
from raypipe.training.task import TrainTask

#: what becomes of a logged step (a row) or a remark to the user (a text) while the run goes on;
#: never called per step
Report = Callable[[dict[str, Any] | str], None]


@dataclass(frozen=True)
class TrainingJob:
    """A training run as its workers receive it.

    ``plan`` is for the largest number of workers; a smaller group raises the accumulation.
    ``eval_batch`` is how many samples a worker evaluates at a time. A ``measured`` run is there
    for its figures: it neither evaluates nor keeps a checkpoint or a model.
    """

    trial_id: str
    run_id: str
    task: TrainTask
    settings: TrainStageSettings
    plan: BatchPlan
    run_dir: RunDirectory
    steps_table: Table = STEPS
    attempt: int = 1
    eval_batch: int | None = None
    measured: bool = False
    parent: str | None = None
    until: int | None = None

    @property
    def whole(self) -> int:
        """The optimiser steps of the training."""
        phases = self.task.phases(self.settings.training, self.plan.effective_batch)
        return sum(phase.steps for phase in phases)

    @property
    def steps(self) -> int:
        """The step after which this run ends."""
        return self.whole if self.until is None else min(self.until, self.whole)


@dataclass(frozen=True)
class Worker:
    """Which worker of the group this process is, and the device it trains on."""

    rank: int
    device: torch.device
    workers: int = 1
    workers_on_node: int = 1
