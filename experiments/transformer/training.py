"""Training of the transformer by the mean cross-entropy or squared error of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from experiments.transformer.data.splits import Splits
from experiments.transformer.dataset import RandomSamples, Sample, StoredSamples
from experiments.transformer.model import (
    PADDING,
    EncoderLayer,
    Transformer,
    combined,
    flops_per_sample,
    mean_of,
)
from experiments.transformer.settings import TransformerSettings
from raypipe.store.run_directory import RunDirectory
from raypipe.training.task import Loss, StepContext, TrainTask


class TransformerTask(TrainTask):
    """Classification or regression; a sample is a tuple of the model's inputs and the target.

    Samples are ``(ids, target)``, ``(ids, ngrams, weights, target)`` or ``(numeric, categories,
    target)``. ``deviation`` is the unit of a standardized target; with it, errors are measured in
    the unit of the original target.
    """

    def __init__(
        self,
        settings: TransformerSettings,
        data: Dataset[Sample],
        held_out: Dataset[Sample] | None = None,
        deviation: float | None = None,
    ) -> None:
        self.settings = settings
        self.deviation = deviation
        self.data = data
        self.held_out = held_out

    def build_model(self) -> Transformer:
        """Return the transformer of the settings."""
        return Transformer(self.settings)

    def metadata(self) -> Mapping[str, str]:
        """Return the settings of the model."""
        return {"model": self.settings.model_dump_json()}

    def build_dataset(self) -> Dataset[Sample]:
        """Return the training samples."""
        return self.data

    def build_eval_dataset(self) -> Dataset[Sample] | None:
        """Return the samples that choose the best step, if any; random ones choose nothing."""
        return self.held_out

    def collate(self) -> Callable[[list[Sample]], Sample]:
        """Return the function that pads sequences to the longest of the batch."""
        return pad if self.settings.vocabulary else default_collate

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the encoder layers."""
        return [module for module in model.modules() if isinstance(module, EncoderLayer)]

    def flops_per_sample(self, model: nn.Module) -> float:
        """Return the count of :func:`~experiments.transformer.model.flops_per_sample`."""
        del model
        return float(flops_per_sample(self.settings))

    def loss(self, model: Transformer, batch: Sample, context: StepContext) -> Loss:
        """Return the cross-entropy in nats with the accuracy, or the squared error with errors.

        In training mode the loss is the mean of those of the branches: a branch that fits the
        training rows sooner would otherwise keep the other one from learning.
        """
        del context
        *inputs, target = batch
        branches = model.branches(*inputs)
        if branches[0].dtype != torch.float64:  # half precision under autocast
            branches = [branch.float() for branch in branches]
        outputs = combined(branches, self.settings)
        parts = branches if model.training else [outputs]
        if self.settings.kind == "regression":
            target = target.to(outputs.dtype)
            total = mean_of([F.mse_loss(part[:, 0], target, reduction="sum") for part in parts])
            if self.deviation is None:
                return Loss(total, len(target))
            errors = outputs.detach()[:, 0] - target
            absolute = errors.abs().sum() * self.deviation
            squared = errors.square().sum() * self.deviation**2
            return Loss(total, len(target), {"mae": absolute, "mse": squared})
        hits = (outputs.detach().argmax(1) == target).sum()
        total = mean_of([F.cross_entropy(part, target, reduction="sum") for part in parts])
        return Loss(total, len(target), {"accuracy": hits})


def pad(samples: list[Sample]) -> Sample:
    """Return sequences and their targets as a batch, each input padded to its longest one."""
    *inputs, targets = zip(*samples, strict=True)
    padded = [pad_sequence(list(each), batch_first=True, padding_value=PADDING) for each in inputs]
    return *padded, torch.stack(targets)


def build_task(data: Splits | None, settings: Any, run_dir: RunDirectory | None) -> TransformerTask:
    """Return the training on prepared samples; on random ones without data or a run directory."""
    model = settings.model.completed(data.sizes() if data else {})
    if data is None or run_dir is None:
        own = settings.data
        samples = RandomSamples(model, own.samples, own.seed)
        held_out = RandomSamples(model, own.held_out, own.seed, first=own.samples)
        return TransformerTask(model, samples, held_out)
    deviation = data.target.deviation if model.kind == "regression" else None
    validation = StoredSamples(run_dir, "validation") if data.validation.any() else None
    return TransformerTask(model, StoredSamples(run_dir, "train"), validation, deviation)
