"""Phase 5: training of the classifier, the binary cross-entropy of every class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.teleclass.classifier import (
    blocks_of,
    build_classifier,
    flops_of,
    metadata_of,
    vocabulary_of,
)
from experiments.teleclass.hierarchy import training_set_path
from experiments.teleclass.settings import ClassifierSettings, TeleclassSettings
from experiments.teleclass.tokens import BLOCK, read_tokens
from raypipe.storage.artifacts import read_parquet
from raypipe.storage.run_directory import RunDirectory
from raypipe.training.task import Loss, StepContext, TrainTask

#: token ids, class indices, the vector of phase 1 (empty where it is no input)
Sample = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]
#: token ids ``[B, L]`` padded by 0, their lengths ``[B]``, vectors ``[B, d]``, targets ``[B, C]``
Batch = tuple[Tensor, Tensor, Tensor, Tensor]

NOTHING = np.empty(0, np.float32)
_THRESHOLD = 0.5
_LONGEST = 10_000
#: the seed of which documents are held out
_HELD_OUT = 20_240_301


@dataclass(frozen=True)
class TokenisedDocuments(Dataset[Sample]):
    """The training set as tokens, class indices and vectors, some rows of it; mapped, not read.

    Attributes:
        run: the run directory that holds it.
        rows: the positions that count, int64.

    """

    run: RunDirectory
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
            table = read_tokens(self.run, number)
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
        return {"run": self.run, "rows": self.rows}


@dataclass(frozen=True)
class LongestSamples(Dataset[Sample]):
    """Random samples of the full length: what the memory and the speed of a training hang on."""

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


@dataclass(frozen=True)
class Collate:
    """Samples to a batch, as long as its longest text."""

    classes: int

    def __call__(self, samples: list[Sample]) -> Batch:
        """The batch."""
        lengths = torch.tensor([len(tokens) for tokens, _, _ in samples])
        ids = torch.zeros(len(samples), max(1, int(lengths.max())), dtype=torch.int64)
        targets = torch.zeros(len(samples), self.classes)
        for row, (tokens, labels, _) in enumerate(samples):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            targets[row, labels.astype(np.int64)] = 1
        vectors = torch.from_numpy(np.stack([vector for _, _, vector in samples]))
        return ids, lengths, vectors, targets


class TeleclassTask(TrainTask):
    """The multi-label classifier; a sample is the tokens of a document and its class indices."""

    def __init__(
        self,
        settings: ClassifierSettings,
        classes: int,
        data: TokenisedDocuments | LongestSamples,
        held_out: Dataset[Sample] | None = None,
    ) -> None:
        self.settings, self.classes = settings, classes
        self.data, self.held_out = data, held_out

    def build_model(self) -> nn.Module:
        """The classifier of the settings."""
        return build_classifier(self.settings, self.classes, self.data.width)

    def metadata(self) -> Mapping[str, str]:
        """What the classifier is built from again."""
        return metadata_of(self.settings, self.classes, self.data.width)

    def build_dataset(self) -> Dataset[Sample]:
        """The labelled documents."""
        return self.data

    def build_eval_dataset(self) -> Dataset[Sample] | None:
        """The labelled documents that are held out; their labels are pseudo-labels, too."""
        return self.held_out

    def collate(self) -> Callable[[list[Sample]], Batch]:
        """Padding to the longest text of the batch."""
        return Collate(self.classes)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The encoder's layers."""
        return blocks_of(model)

    def flops_per_sample(self, model: nn.Module) -> float:
        """At the full length, as :func:`~experiments.teleclass.classifier.flops_of` counts."""
        return flops_of(model, self.settings, self.classes)

    def loss(self, model: nn.Module, batch: Batch, context: StepContext) -> Loss:
        """The mean binary cross-entropy of the classes, in nats, summed over the documents."""
        del context
        *inputs, targets = batch
        logits = model(*inputs).float()
        total = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / self.classes
        chosen = logits.detach().sigmoid() > _THRESHOLD
        both = 2 * (chosen * targets).sum(1) / (chosen.sum(1) + targets.sum(1)).clamp(min=1)
        return Loss(total, len(targets), {"example_f1": both.sum()})


def build_task(
    run: RunDirectory | None, settings: TeleclassSettings, classes: int
) -> TeleclassTask:
    """The task of a run's training set; without a run one of samples of the full length.

    Which documents are held out is drawn once.
    """
    classifier = settings.train.classifier
    if run is None:
        width = settings.encode.dimensions if classifier.takes_vectors else 0
        samples = LongestSamples(classifier.length, vocabulary_of(classifier), classes, width)
        return TeleclassTask(classifier, classes, samples)
    size = read_parquet(run, training_set_path(run)).num_rows
    order = np.random.default_rng(_HELD_OUT).permutation(size)
    count = min(round(settings.train.held_out * size), size - 1)
    kept, out = (TokenisedDocuments(run, np.sort(rows)) for rows in (order[count:], order[:count]))
    return TeleclassTask(classifier, classes, kept, out if count else None)
