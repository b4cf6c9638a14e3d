"""raypipe's training loop, in this process."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.loops.cases import Case
from benchmarks.loops.measure import Logged
from raypipe.store.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train as train_job
from raypipe.training.parallel import Worker
from raypipe.training.settings import LoaderSettings, TrainStageSettings


def train(case: Case, device: torch.device) -> list[Logged]:
    """Train and return the mean loss of each logged step."""
    return measured(case, device)[0]


def measured(case: Case, device: torch.device) -> tuple[list[Logged], dict[str, Any]]:
    """Return the losses as ``train``, and the columns of ``trials`` that the loop determines."""
    stage = TrainStageSettings(
        training=case.training, loader=LoaderSettings(workers=case.loader_workers)
    )
    plan = BatchPlan(case.micro_batch, case.accumulation, case.effective_batch, workers=1)
    losses: list[Logged] = []

    def note(event: dict[str, Any] | str) -> None:
        if isinstance(event, dict):
            last = event["step"] * case.accumulation
            losses.append(Logged(last - case.accumulation, last, event["loss"]))

    with TemporaryDirectory() as folder:
        run = RunDirectory.at(folder)
        job = TrainingJob("benchmark", "benchmark", case.task, stage, plan, run)
        outcome = train_job(job, Worker(0, device), note)
    return losses, outcome
