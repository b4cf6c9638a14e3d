"""Evaluation on held-out data: the loss and the metrics of the task."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from raypipe.errors import BatchLimit
from raypipe.training import loader, parallel, precision
from raypipe.training import oom as memory
from raypipe.training.parallel import Worker
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import Loss, StepContext, TrainTask


def evaluate(
    task: TrainTask,
    settings: TrainStageSettings,
    worker: Worker,
    call: parallel.ModelCall,
    dataset: Dataset[Any] | None,
    batch_size: int,
    context: StepContext,
) -> dict[str, float]:
    """Return the mean loss and metrics over the held-out data, and the task's own measures.

    The workers share the held-out samples.

    Raises:
        DoesNotFit: an evaluation batch exceeds the memory of the device.

    """
    measures: dict[str, float] = {}
    with (
        memory.fitting(BatchLimit("evaluation", batch_size)),
        precision.autocast(settings.training.precision, worker.device),
    ):
        if dataset is not None:
            sums = parallel.all_reduce(
                _sums(task, settings, worker, call, dataset, batch_size, context), worker.workers
            )
            weight = sums.pop("weight").item()
            measures = {name: value.item() / weight for name, value in sums.items()}
        measures |= call(task.evaluate, worker.device, batch_size)
    return measures


def _sums(
    task: TrainTask,
    settings: TrainStageSettings,
    worker: Worker,
    call: parallel.ModelCall,
    dataset: Dataset[Any],
    batch_size: int,
    context: StepContext,
) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    batches = loader.eval_batches(task, dataset, batch_size, worker, settings.loader)
    with closing(batches):
        for batch, counted in batches:
            loss: Loss = call(task.loss, batch, context)
            # a worker without samples left still takes part: FSDP gathers weights from all
            add(sums, loss, worker.device, counted=counted)
    return sums


def add(sums: dict[str, Tensor], loss: Loss, device: torch.device, *, counted: bool = True) -> None:
    """Add a loss, its weight and its metrics to ``sums``, in float64."""
    for name, value in {"loss": loss.total, **loss.metrics}.items():
        _add(sums, name, value.detach().double(), counted=counted)
    add_weight(sums, loss, device, counted=counted)


def add_weight(
    sums: dict[str, Tensor], loss: Loss, device: torch.device, *, counted: bool = True
) -> None:
    """Add the weight of a loss to the sum ``weight``, in float64."""
    weight = loss.weight
    if not isinstance(weight, Tensor):  # filled on the device, which avoids a blocking copy
        weight = torch.full((), weight, device=device, dtype=torch.float64)
    _add(sums, "weight", weight.detach().double(), counted=counted)


def _add(sums: dict[str, Tensor], name: str, value: Tensor, *, counted: bool) -> None:
    if not counted:
        value = torch.zeros_like(value)
    sums[name] = sums[name] + value if name in sums else value
