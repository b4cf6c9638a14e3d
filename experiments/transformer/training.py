"""Training of the transformer on prepared or random samples, by cross-entropy or squared error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from experiments.common.blocks import Part
from experiments.common.task import DatasetTask
from experiments.transformer.data import Splits
from experiments.transformer.model import (
    PADDING,
    EncoderLayer,
    Transformer,
    combined,
    flops_per_sample,
    mean_of,
)
from experiments.transformer.prepare import split_path
from experiments.transformer.settings import TransformerSettings
from raypipe import Loss, RunDirectory, StepContext, artifacts, keyed_random

#: the model's inputs (token ids, maybe n-grams and their weights; or numeric features and
#: categories), then the target
Sample = tuple[Tensor, ...]

_NUMBERS, _IDS, _RULE = range(3)


@dataclass(frozen=True)
class StoredSamples(Dataset[Sample]):
    """The rows of a split; cheap to pickle, opened on the first read.

    A sequence is ``(ids, target)``, or ``(ids, ngrams, weights, target)``; a row of a table
    ``(numeric, categories, target)``.
    """

    run_dir: RunDirectory
    split: Part

    def __len__(self) -> int:
        return len(self._columns["target"])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        columns = self._columns
        target = torch.tensor(columns["target"][index])
        if "tokens" in columns:
            names = [name for name in ("tokens", "ngrams") if name in columns]
            ids = [torch.tensor(columns[name][index].values.to_numpy()).long() for name in names]
            if "weights" in columns:
                ids.append(torch.tensor(columns["weights"][index].values.to_numpy()))
            return *ids, target
        categories = torch.tensor(columns["categories"][index]).long()
        return torch.tensor(columns["numeric"][index]), categories, target

    @cached_property
    def _columns(self) -> dict[str, Any]:
        table = artifacts.read_arrow(self.run_dir, split_path(self.run_dir, self.split))
        # one chunk each; combine_chunks would copy it
        columns = {name: table.column(name).chunk(0) for name in table.column_names}
        columns["target"] = columns["target"].to_numpy()
        if "tokens" not in columns:
            for name, dtype in (("numeric", np.float32), ("categories", np.int32)):
                values = columns[name].values.to_numpy() if name in columns else np.empty(0, dtype)
                columns[name] = values.reshape(len(table), -1)
        return columns

    def __getstate__(self) -> dict[str, object]:
        return {"run_dir": self.run_dir, "split": self.split}


@dataclass(frozen=True)
class RandomSamples(Dataset[Sample]):
    """Random sequences or table rows with a rule to learn.

    Each value of each feature, or token, has an effect on each output; the effects of a sample are
    added. The target is the output with the largest sum, or the sum itself for a regression.
    Sample ``i`` depends only on ``(seed, first + i)``, and the effects on the seed: a held-out set
    of the same rule begins where the training set ends. Numeric features are standard normal,
    categories and tokens uniform; up to half of the ``length`` tokens of a sequence are padding.
    The n-grams of a sequence are its tokens.
    """

    settings: TransformerSettings
    samples: int
    seed: int = 0
    first: int = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """Return the samples of a batch from one draw; PyTorch's loader calls this method.

        Raises:
            IndexError: an index is outside [0, samples).

        """
        if not all(0 <= index < self.samples for index in indices):
            raise IndexError(f"sample {indices} of {self.samples}")
        numbers = self.first + torch.tensor(indices)
        draw = self._sequences if self.settings.vocabulary else self._rows
        *inputs, scores = draw(numbers)
        regression = self.settings.kind == "regression"
        target = scores[:, 0].float() if regression else scores.argmax(1)
        return list(zip(*inputs, target, strict=True))

    def _sequences(self, numbers: Tensor) -> Sample:
        s = self.settings
        draws = keyed_random.words(self.seed, _IDS, numbers, 1 + s.length)
        lengths = s.length - (draws[:, :1] * (1 + s.length // 2) >> 32)
        real = torch.arange(s.length) < lengths
        ids = torch.where(real, 1 + (draws[:, 1:] * (s.vocabulary - 1) >> 32), PADDING)
        total = (self._effects[ids] * real[..., None]).sum(1)
        scores = total / lengths.sqrt()
        if s.ngrams is None:
            return ids, scores
        ngrams = torch.where(real, 1 + ids % s.ngrams.most, PADDING)
        return ids, ngrams, real / lengths.float().sqrt(), scores

    def _rows(self, numbers: Tensor) -> Sample:
        s = self.settings
        sizes = torch.tensor(s.categories, dtype=torch.int64)
        numeric = keyed_random.normal(self.seed, _NUMBERS, numbers, s.numeric)
        categories = keyed_random.words(self.seed, _IDS, numbers, len(sizes)) * sizes >> 32
        effects = self._effects[s.numeric + sizes.cumsum(0) - sizes + categories]
        total = (numeric[..., None] * self._effects[: s.numeric]).sum(1) + effects.sum(1)
        return numeric, categories, total / (s.tokens - 1) ** 0.5

    @cached_property
    def _effects(self) -> Tensor:
        """The effects, one row per numeric feature, then per category or token.

        The effects of the categories of a feature, and of all tokens, have mean zero, so that no
        class is preferred. In double precision, a sum does not depend on the batch.
        """
        s = self.settings
        sizes = (s.numeric, 1, s.vocabulary - 1) if s.vocabulary else (s.numeric, *s.categories)
        rows = torch.arange(sum(sizes))
        effects = keyed_random.normal(self.seed, _RULE, rows, s.outputs, torch.float64)
        numeric, *ids = effects.split(sizes)
        return torch.cat([numeric, *(part - part.mean(0) for part in ids)])


class TransformerTask(DatasetTask):
    """Classification or regression; a sample is a tuple of the model's inputs and the target.

    Samples are ``(ids, target)``, ``(ids, ngrams, weights, target)`` or ``(numeric, categories,
    target)``. ``deviation`` is the unit of a standardized target; with it, errors are measured in
    the unit of the original target.
    """

    settings: TransformerSettings

    def __init__(
        self,
        settings: TransformerSettings,
        data: Dataset[Sample],
        held_out: Dataset[Sample] | None = None,
        deviation: float | None = None,
    ) -> None:
        super().__init__(settings, data, held_out)
        self.deviation = deviation

    def build_model(self) -> Transformer:
        """Return the transformer of the settings."""
        return Transformer(self.settings)

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
