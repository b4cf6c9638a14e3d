"""Evaluation on held-out data: sums of the loss and of metrics, over all batches and workers."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from raypipe.errors import BatchLimit
from raypipe.training import failure_kinds, loader, parallel, precision
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
    sums: dict[str, Tensor] = {}
    measures: dict[str, float] = {}
    with (
        failure_kinds.fitting(BatchLimit("evaluation", batch_size)),
        precision.autocast(settings.training.precision, worker.device),
    ):
        if dataset is not None:
            batches = loader.eval_batches(task, dataset, batch_size, worker, settings.loader)
            with closing(batches):
                for batch, counted in batches:
                    loss: Loss = call(task.loss, batch, context)
                    # a worker without samples left takes part: FSDP gathers weights from all
                    add(sums, loss, worker.device, counted=counted)
            sums = parallel.all_reduce(sums, worker.workers)
            weight = sums.pop("weight").item()
            measures = {name: value.item() / weight for name, value in sums.items()}
        measures |= call(task.evaluate, worker.device, batch_size)
    return measures


def add(
    sums: dict[str, Tensor],
    loss: Loss,
    device: torch.device,
    *,
    counted: bool = True,
    weight_only: bool = False,
) -> None:
    """Add the weight of a loss to ``sums``, and its total and metrics, in float64."""
    values = {"weight": loss.weight}
    if not weight_only:
        values |= {"loss": loss.total, **loss.metrics}
    for name, value in values.items():
        if not isinstance(value, Tensor):  # filled on the device, which avoids a blocking copy
            value = torch.full((), value, device=device)
        value = value.detach().double()
        if not counted:
            value = torch.zeros_like(value)
        sums[name] = sums[name] + value if name in sums else value
