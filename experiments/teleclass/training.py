"""Phase 5: training of the classifier, the binary cross-entropy of every class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.teleclass.artifacts import read_parquet
from experiments.teleclass.classifier import (
    blocks_of,
    build_classifier,
    flops_of,
    metadata_of,
    vocabulary_of,
)
from experiments.teleclass.settings import ClassifierSettings
from experiments.teleclass.training_set import Sample, TokenisedDocuments, training_set_path
from raypipe.paths import RunDirectory
from raypipe.training.task import Loss, StepContext, TrainTask

_THRESHOLD = 0.5
_LONGEST = 10_000
#: the seed of which documents are held out
_HELD_OUT = 20_240_301


@dataclass(frozen=True)
class LongestSamples(Dataset[Sample]):
    """Random samples of the full length: what the memory and the speed of a training hang on."""

    length: int
    vocabulary: int
    classes: int

    def __len__(self) -> int:
        return _LONGEST

    def __getitem__(self, index: int) -> Sample:
        draw = np.random.default_rng(index)
        tokens = draw.integers(1, self.vocabulary, self.length, dtype=np.int32)
        return tokens, draw.integers(0, self.classes, 3, dtype=np.int32)


@dataclass(frozen=True)
class Collate:
    """Samples to token ids ``[B, L]`` padded by 0, their lengths ``[B]`` and targets ``[B, C]``."""

    classes: int

    def __call__(self, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """A batch, as long as its longest sample."""
        lengths = torch.tensor([len(tokens) for tokens, _ in samples])
        ids = torch.zeros(len(samples), max(1, int(lengths.max())), dtype=torch.int64)
        targets = torch.zeros(len(samples), self.classes)
        for row, (tokens, labels) in enumerate(samples):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            targets[row, labels.astype(np.int64)] = 1
        return ids, lengths, targets


class TeleclassTask(TrainTask):
    """The multi-label classifier; a sample is the tokens of a document and its class indices."""

    def __init__(
        self,
        settings: ClassifierSettings,
        classes: int,
        data: Dataset[Sample],
        held_out: Dataset[Sample] | None,
    ) -> None:
        self.settings, self.classes = settings, classes
        self.data, self.held_out = data, held_out

    def build_model(self) -> nn.Module:
        """The classifier of the settings."""
        return build_classifier(self.settings, self.classes)

    def metadata(self) -> Mapping[str, str]:
        """What the classifier is built from again."""
        return metadata_of(self.settings, self.classes)

    def build_dataset(self) -> Dataset[Sample]:
        """The labelled documents."""
        return self.data

    def build_eval_dataset(self) -> Dataset[Sample] | None:
        """The labelled documents that are held out; their labels are pseudo-labels, too."""
        return self.held_out

    def collate(self) -> Callable[[list[Sample]], tuple[Tensor, Tensor, Tensor]]:
        """Padding to the longest text of the batch."""
        return Collate(self.classes)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The encoder's layers."""
        return blocks_of(model)

    def flops_per_sample(self, model: nn.Module) -> float:
        """At the full length, as :func:`~experiments.teleclass.classifier.flops_of` counts."""
        return flops_of(model, self.settings, self.classes)

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], context: StepContext
    ) -> Loss:
        """The mean binary cross-entropy of the classes, in nats, summed over the documents."""
        del context
        ids, lengths, targets = batch
        logits = model(ids, lengths).float()
        total = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / self.classes
        chosen = logits.detach().sigmoid() > _THRESHOLD
        both = 2 * (chosen * targets).sum(1) / (chosen.sum(1) + targets.sum(1)).clamp(min=1)
        return Loss(total, len(ids), {"example_f1": both.sum()})


def build_task(
    run: RunDirectory | None, settings: ClassifierSettings, classes: int, held_out: float
) -> TeleclassTask:
    """The task of a run's training set; without a run one of samples of the full length.

    ``held_out`` is the share of the documents that is evaluated on; which ones is drawn once.
    """
    if run is None:
        samples = LongestSamples(settings.length, vocabulary_of(settings), classes)
        return TeleclassTask(settings, classes, samples, None)
    size = read_parquet(run, training_set_path(run)).num_rows
    order = np.random.default_rng(_HELD_OUT).permutation(size)
    count = min(round(held_out * size), size - 1)
    kept, out = (TokenisedDocuments(run, np.sort(rows)) for rows in (order[count:], order[:count]))
    return TeleclassTask(settings, classes, kept, out if count else None)
