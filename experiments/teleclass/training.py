"""Phase 5, train: the classifier, by the binary cross-entropy of every class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.common.task import DatasetTask
from experiments.teleclass.artifacts import training_set_path
from experiments.teleclass.model import (
    blocks_of,
    build_classifier,
    flops_of,
    metadata_of,
    vocabulary_of,
)
from experiments.teleclass.settings import ClassifierSettings, takes_vectors
from experiments.teleclass.training_set import BLOCK, read_tokens
from raypipe import Loss, RunDirectory, StepContext, artifacts

#: token ids, class indices, the vector of phase 1 (empty if it is not an input)
Sample = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]

NOTHING = np.empty(0, np.float32)
_LONGEST = 10_000


@dataclass(frozen=True)
class TokenizedDocuments(Dataset[Sample]):
    """Rows of the training set as tokens, class indices and vectors, memory-mapped.

    Attributes:
        run_dir: the run directory that holds it.
        rows: the positions of the samples, int64.

    """

    run_dir: RunDirectory
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        block, row = divmod(int(self.rows[index]), BLOCK)
        tokens, labels, vectors = self._block(block)
        vector = NOTHING if vectors is None else vectors[row].values.to_numpy()
        return tokens[row].values.to_numpy(), labels[row].values.to_numpy(), vector

    @cached_property
    def width(self) -> int:
        """The dimensions of the vectors; 0 where there are none."""
        return len(self[0][2])

    def _block(self, number: int) -> tuple[pa.Array, pa.Array, pa.Array | None]:
        if number not in self._blocks:
            table = read_tokens(self.run_dir, number)
            names = ("tokens", "labels", "vector")
            self._blocks[number] = tuple(  # one chunk each; combine_chunks would copy it
                table.column(name).chunk(0) if name in table.column_names else None
                for name in names
            )
        return self._blocks[number]

    @cached_property
    def _blocks(self) -> dict[int, tuple[pa.Array, ...]]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {"run_dir": self.run_dir, "rows": self.rows}


@dataclass(frozen=True)
class LongestSamples(Dataset[Sample]):
    """Random samples of the full length, for measurements without data."""

    length: int
    vocabulary: int
    classes: int
    width: int

    def __len__(self) -> int:
        return _LONGEST

    def __getitem__(self, index: int) -> Sample:
        draw = np.random.default_rng(index)
        tokens = draw.integers(1, self.vocabulary, self.length, dtype=np.int32)
        labels = draw.integers(0, self.classes, 3, dtype=np.int32)
        return tokens, labels, draw.standard_normal(self.width, dtype=np.float32)


#: token ids ``[B, L]`` padded by 0, their lengths ``[B]``, vectors ``[B, d]``, targets ``[B, C]``
Batch = tuple[Tensor, Tensor, Tensor, Tensor]

_THRESHOLD = 0.5
#: seed of the selection of held-out documents
_HELD_OUT = 20_240_301


@dataclass(frozen=True)
class Collate:
    """Collate samples to a batch, as long as its longest text."""

    classes: int

    def __call__(self, samples: list[Sample]) -> Batch:
        """Return the batch."""
        lengths = torch.tensor([len(tokens) for tokens, _, _ in samples])
        ids = torch.zeros(len(samples), max(1, int(lengths.max())), dtype=torch.int64)
        targets = torch.zeros(len(samples), self.classes)
        for row, (tokens, labels, _) in enumerate(samples):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            targets[row, labels.astype(np.int64)] = 1
        vectors = torch.from_numpy(np.stack([vector for _, _, vector in samples]))
        return ids, lengths, vectors, targets


class TeleclassTask(DatasetTask):
    """The multi-label classifier; a sample is the tokens of a document and its class indices."""

    def __init__(
        self,
        settings: ClassifierSettings,
        classes: int,
        data: TokenizedDocuments | LongestSamples,
        held_out: Dataset[Sample] | None = None,
    ) -> None:
        super().__init__(settings, data, held_out)
        self.classes = classes

    def build_model(self) -> nn.Module:
        """Return the classifier of the settings."""
        return build_classifier(self.settings, self.classes, self.data.width)

    def metadata(self) -> Mapping[str, str]:
        """Return what the classifier is restored from."""
        return metadata_of(self.settings, self.classes, self.data.width)

    def collate(self) -> Callable[[list[Sample]], Batch]:
        """Return the function that pads to the longest text of the batch."""
        return Collate(self.classes)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the encoder's layers."""
        return blocks_of(model)

    def flops_per_sample(self, model: nn.Module) -> float:
        """At the full length, as :func:`~experiments.teleclass.model.flops_of` counts."""
        return flops_of(model, self.settings, self.classes)

    def loss(self, model: nn.Module, batch: Batch, context: StepContext) -> Loss:
        """Return the mean binary cross-entropy of the classes, in nats, summed over documents."""
        del context
        *inputs, targets = batch
        logits = model(*inputs).float()
        total = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / self.classes
        chosen = logits.detach().sigmoid() > _THRESHOLD
        both = 2 * (chosen * targets).sum(1) / (chosen.sum(1) + targets.sum(1)).clamp(min=1)
        return Loss(total, len(targets), {"pseudo_label_f1": both.sum()})


def build_task(classes: int, settings: Any, run_dir: RunDirectory | None) -> TeleclassTask:
    """Return the training on a run's training set; without a run, on samples of the full length.

    The held-out documents are the same in every training.
    """
    classifier = settings.train.classifier
    if run_dir is None:
        width = settings.encode.dimensions if takes_vectors(classifier) else 0
        samples = LongestSamples(classifier.length, vocabulary_of(classifier), classes, width)
        return TeleclassTask(classifier, classes, samples)
    size = artifacts.read_parquet(run_dir, training_set_path(run_dir)).num_rows
    order = np.random.default_rng(_HELD_OUT).permutation(size)
    count = min(round(settings.train.held_out * size), size - 1)
    train, held_out = (
        TokenizedDocuments(run_dir, np.sort(rows)) for rows in (order[count:], order[:count])
    )
    return TeleclassTask(classifier, classes, train, held_out if count else None)
