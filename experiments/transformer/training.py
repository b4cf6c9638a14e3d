"""Training of the transformer by the mean cross-entropy or squared error of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from experiments.transformer.data.splits import Data
from experiments.transformer.dataset import RandomSamples, Sample, StoredSamples
from experiments.transformer.model import PADDING, EncoderLayer, Transformer, flops_per_sample
from experiments.transformer.settings import TransformerSettings
from raypipe.storage.run_directory import RunDirectory
from raypipe.training.task import Loss, StepContext, TrainTask


class TransformerTask(TrainTask):
    """Classification or regression; a sample is a tuple of the model's inputs and the target.

    Samples are ``(ids, target)`` or ``(numeric, categories, target)``. ``deviation`` is the unit
    of a standardized target; with it, errors are measured in the unit of the original target.
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
        """Return the held-out samples."""
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

    def loss(self, model: nn.Module, batch: Sample, context: StepContext) -> Loss:
        """Return the cross-entropy in nats with the accuracy, or the squared error with errors."""
        del context
        *inputs, target = batch
        outputs = model(*inputs)
        if outputs.dtype != torch.float64:  # half precision under autocast
            outputs = outputs.float()
        if self.settings.kind == "regression":
            target = target.to(outputs.dtype)
            total = F.mse_loss(outputs[:, 0], target, reduction="sum")
            if self.deviation is None:
                return Loss(total, len(target))
            absolute = (outputs.detach()[:, 0] - target).abs().sum() * self.deviation
            squared = total.detach() * self.deviation**2
            return Loss(total, len(target), {"mae": absolute, "mse": squared})
        hits = (outputs.detach().argmax(1) == target).sum()
        total = F.cross_entropy(outputs, target, reduction="sum")
        return Loss(total, len(target), {"accuracy": hits})


def pad(samples: list[Sample]) -> Sample:
    """Return sequences of ids and their targets as a batch, padded to its longest sequence."""
    ids, targets = zip(*samples, strict=True)
    return pad_sequence(list(ids), batch_first=True, padding_value=PADDING), torch.stack(targets)


def build_task(data: Data | None, settings: Any, run_dir: RunDirectory | None) -> TransformerTask:
    """Return the training on prepared samples; on random ones without data or a run directory."""
    model = settings.model.completed(data.sizes() if data else {})
    if data is None or run_dir is None:
        own = settings.data
        samples = RandomSamples(model, own.samples, own.seed)
        held_out = RandomSamples(model, own.held_out, own.seed, first=own.samples)
        return TransformerTask(model, samples, held_out)
    deviation = data.target.deviation if model.kind == "regression" else None
    splits = StoredSamples(run_dir, "train"), StoredSamples(run_dir, "held_out")
    return TransformerTask(model, *splits, deviation)
