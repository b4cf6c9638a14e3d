"""Training of the summarizer on stored or random pairs, by the cross-entropy of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.common.blocks import Part
from experiments.common.cross_entropy import linear_cross_entropies
from experiments.common.task import DatasetTask
from experiments.summarization.model import (
    PAD,
    T5Settings,
    build_model,
    flops_per_sample,
    next_token_states,
)
from experiments.summarization.tokenizer import END, pairs_path
from raypipe import Loss, RunDirectory, StepContext, artifacts, keyed_random

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

#: source and target, int64 ``[S]`` and ``[T]``; both end with END
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StoredPairs(Dataset[Pair]):
    """The pairs of a split; cheap to pickle, because a process opens the file when it reads.

    Attributes:
        run_dir: the run directory.
        split: the split.
        source_length: maximum number of tokens of a source, including its end.

    """

    run_dir: RunDirectory
    split: Part
    source_length: int

    def __len__(self) -> int:
        return len(self._columns["target"])

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source, target = (
            torch.tensor(self._columns[name][index].values.to_numpy(), dtype=torch.int64)
            for name in ("source", "target")
        )
        if len(source) > self.source_length:
            source = torch.cat((source[: self.source_length - 1], source[-1:]))
        return source, target

    def lengths(self) -> Tensor:
        """Return the numbers of tokens of each source and target, int64 ``[samples, 2]``."""
        source, target = (
            pc.list_value_length(self._columns[name]).to_numpy(zero_copy_only=False)
            for name in ("source", "target")
        )
        both = np.stack((np.minimum(source, self.source_length), target), axis=1)
        return torch.from_numpy(both.astype(np.int64))

    @cached_property
    def _columns(self) -> dict[str, Any]:
        table: pa.Table = artifacts.read_arrow(self.run_dir, pairs_path(self.run_dir, self.split))
        # each column is one chunk; combine_chunks would copy it
        return {name: table.column(name).chunk(0) for name in table.column_names}

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("run_dir", "split", "source_length")}


@dataclass(frozen=True)
class RandomPairs(Dataset[Pair]):
    """Uniform random tokens of full length: nothing to learn, but the full work of a step.

    Sample ``i`` depends only on ``i``.
    """

    vocabulary: int
    source_length: int
    target_length: int
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        size = self.source_length + self.target_length
        draws = keyed_random.words(0, 0, torch.tensor([index]), size)[0]
        ids = END + (draws * (self.vocabulary - END) >> 32)
        ids[self.source_length - 1] = ids[-1] = END
        return ids[: self.source_length], ids[self.source_length :]

    def lengths(self) -> Tensor:
        """Return the numbers of tokens of each source and target, int64 ``[samples, 2]``."""
        return torch.tensor([[self.source_length, self.target_length]]).expand(self.samples, 2)


#: batches are padded to a multiple of what matrix units process at once
MULTIPLE = 8
#: tokens below which sources are not shortened further
SHORTEST = 64
#: factor of copied values, relative to other values of about 1
_COPY_SCALE = 2.0
#: random samples of a task without a run
_RANDOM_SAMPLES = 4096

Pairs = StoredPairs | RandomPairs


class Batch(NamedTuple):
    """A padded batch.

    Attributes:
        inputs: the sources, int64 ``[B, S]``.
        mask: true at the tokens of a source, bool ``[B, S]``.
        decoder_inputs: the targets without their ends, after a padding, int64 ``[B, T]``.
        targets: the targets, with padding after them, int64 ``[B, T]``.

    """

    inputs: Tensor
    mask: Tensor
    decoder_inputs: Tensor
    targets: Tensor


class SummarizationTask(DatasetTask):
    """Prediction of a summary; a sample is a source and its target, int64, both with an end.

    The evaluation's ``cross_entropy`` is that of the references, without smoothing.
    """

    counts = "tokens"

    settings: T5Settings
    data: Pairs
    held_out: Pairs | None

    def __init__(
        self,
        settings: T5Settings,
        data: Pairs,
        held_out: Pairs | None = None,
        *,
        label_smoothing: float = 0.0,
        copying: bool = False,
        pretrained: str | None = None,
    ) -> None:
        super().__init__(settings, data, held_out)
        self.label_smoothing = label_smoothing
        self.copying = copying
        self.pretrained = pretrained

    def build_model(self) -> T5ForConditionalGeneration:
        """Return the T5 of the settings, with the weights of the pretrained model, if any."""
        if self.pretrained is not None:
            from experiments.summarization.pretrained import load_pretrained

            return load_pretrained(self.pretrained, self.settings)
        model = build_model(self.settings)
        if self.copying:
            begin_as_copy(model)
        return model

    def lengths(self) -> Tensor:
        """Return the length of each training sample, source and target, int64 ``[samples]``."""
        return self.data.lengths().sum(1)

    def shortened(self) -> tuple[SummarizationTask, str] | None:
        """Return the task with sources of half the length, and that length; None if it is short."""
        length = self.data.source_length // 2
        if length < SHORTEST:
            return None
        shorter = copy(self)
        shorter.data = replace(self.data, source_length=length)
        if self.held_out is not None:
            shorter.held_out = replace(self.held_out, source_length=length)
        return shorter, f"sources of at most {length} tokens"

    def collate(self) -> Callable[[list[Pair]], Batch]:
        """Return the function that pads pairs to the longest of the batch."""
        return pad

    def blocks(self, model: Any) -> Iterable[nn.Module]:
        """Return the layers of the encoder and the decoder."""
        return [*model.encoder.block, *model.decoder.block]

    def flops_per_sample(self, model: nn.Module) -> float:
        """Return the model FLOPs of a pair of mean lengths."""
        del model
        source, target = self.data.lengths().double().mean(0).round().int().tolist()
        return float(flops_per_sample(self.settings, source, target))

    def loss(self, model: T5ForConditionalGeneration, batch: Batch, context: StepContext) -> Loss:
        """Return the cross-entropy of the targets in nats, summed over their tokens."""
        del context
        states = next_token_states(model, batch.inputs, batch.mask, batch.decoder_inputs)
        states, targets = states.flatten(0, 1), batch.targets.flatten()
        output, smoothing = model.lm_head.weight, self.label_smoothing
        total, plain = linear_cross_entropies(
            states, output, targets, ignore_index=PAD, label_smoothing=smoothing
        )
        weight = (targets != PAD).sum()
        return Loss(total, weight, {"cross_entropy": plain} if smoothing else {})


@torch.no_grad()
def begin_as_copy(model: Any) -> None:
    """Initialize cross-attention so that the decoder copies the tokens that it attends to.

    Its values are the source's states turned by a random orthogonal matrix, and its output turns
    them back. The states begin as the embeddings of the source. In a tied model these are also the
    output matrix: a token that is attended to becomes probable, like the copying of a
    pointer-generator network (See, Liu, Manning 2017, Get to the point, section 2.2), and only the
    attention must be learned. Thousands of pairs hardly teach copying otherwise.
    """
    for block in model.decoder.block:
        attention = block.layer[1].EncDecAttention
        turn = nn.init.orthogonal_(torch.empty_like(attention.v.weight))
        attention.v.weight.copy_(turn)
        attention.o.weight.copy_(_COPY_SCALE * turn.T)


def build_task(
    has_validation: bool, settings: Any, run_dir: RunDirectory | None
) -> SummarizationTask:
    """Return the training on a run's tokens; without a run, on random tokens of full length.

    ``has_validation`` is whether the run has pairs that choose the best step.
    """
    data, model = settings.data, settings.model
    samples: Pairs
    held_out = None
    if run_dir is None:
        lengths = (data.source_length, data.target_length)
        samples = RandomPairs(model.vocabulary, *lengths, _RANDOM_SAMPLES)
    else:
        samples = StoredPairs(run_dir, "train", data.source_length)
        if has_validation:
            held_out = StoredPairs(run_dir, "validation", data.source_length)
    return SummarizationTask(
        model.sizes,
        samples,
        held_out,
        label_smoothing=settings.label_smoothing,
        copying=settings.copying,
        pretrained=model.pretrained,
    )


def pad(pairs: Sequence[Pair]) -> Batch:
    """Return pairs as a batch, padded to the longest of them, up to a multiple of eight."""
    sources, targets = zip(*pairs, strict=True)
    labels = _padded(targets)
    return Batch(*pad_sources(sources), F.pad(labels[:, :-1], (1, 0), value=PAD), labels)


def pad_sources(sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return inputs and mask of a batch of sources."""
    inputs = _padded(sources)
    return inputs, inputs != PAD


def _padded(parts: Sequence[Tensor]) -> Tensor:
    length = -(-max(len(part) for part in parts) // MULTIPLE) * MULTIPLE
    return torch.stack([F.pad(part, (0, length - len(part)), value=PAD) for part in parts])
