"""Training of the language model on sequences of a token stream: cross-entropy of next tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.common.blocks import Split
from experiments.common.corpora.corpus import CorpusError
from experiments.common.cross_entropy import linear_cross_entropy
from experiments.common.task import DatasetTask
from experiments.lm_pretrain.model import DecoderLayer, LanguageModel, LmSettings, flops_per_token
from experiments.lm_pretrain.shards import TokenFolder, run_folder, tokens_between
from raypipe import Loss, Phase, RunDirectory, StepContext, TrainingSettings, keyed_random

_TRAINING, _HELD_OUT = 0, 1
_MOST_VALIDATION = 2**18


@dataclass(frozen=True)
class PackedTokens(Dataset[Tensor]):
    """Sample ``i`` is tokens ``[i context, (i + 1) context]`` of a split, int64.

    Each token but the first is predicted once, up to the last whole sample. Cheap to pickle: a
    process maps the shards when it reads. ``first`` is the token that sample 0 begins with, and
    ``end`` the one before which the last sample ends.
    """

    folder: TokenFolder
    split: Split
    context: int
    first: int = 0
    end: int | None = None

    def __len__(self) -> int:
        end = self._tokens if self.end is None else self.end
        return max(0, end - self.first - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.window(self.first + index * self.context)

    def window(self, start: int) -> Tensor:
        """Return the ``context + 1`` tokens from a token of the stream on, int64."""
        tokens = tokens_between(self._maps, start, start + self.context + 1)
        return torch.from_numpy(tokens.astype(np.int64))

    @cached_property
    def _tokens(self) -> int:
        return self.folder.index().tokens[self.split]

    @cached_property
    def _maps(self) -> list[NDArray[Any]]:
        return self.folder.maps(self.split)

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class RandomTokens(Dataset[Tensor]):
    """Uniform random tokens: nothing to learn, but the full work of a step.

    Sample ``i``, int64 ``[context + 1]``, depends only on ``(seed, held_out, i)``.
    """

    vocabulary: int
    context: int
    samples: int
    seed: int = 0
    held_out: bool = False

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """Return the samples of a batch in one draw; PyTorch's loader calls it.

        Raises:
            IndexError: an index outside [0, samples).

        """
        if not all(0 <= index < self.samples for index in indices):
            raise IndexError(f"sample {indices} of {self.samples}")
        stream = _HELD_OUT if self.held_out else _TRAINING
        draws = keyed_random.words(self.seed, stream, torch.tensor(indices), self.context + 1)
        return list((draws * self.vocabulary) >> 32)


def validation_tokens(folder: TokenFolder, share: float) -> int:
    """Return the number of training tokens that choose the step and the mixture: the first ones.

    They are ``share`` of the training tokens, at most 2^18. The model does not train on them. The
    end of the training text is of more use to the model: the held-out text often continues it.
    """
    return min(int(folder.index().tokens["train"] * share), _MOST_VALIDATION)


def model_of(folder: TokenFolder, settings: LmSettings) -> LmSettings:
    """Return the model for some tokens: characters and bytes decide its vocabulary."""
    index = folder.index()
    if index.kind == "bpe":
        return settings
    return settings.model_copy(update={"vocabulary": index.vocabulary})


class LanguageModelTask(DatasetTask):
    """Next-token prediction; a sample is a sequence of ``context + 1`` tokens, int64.

    The evaluation's loss is the logarithm of the perplexity.
    """

    counts = "tokens"
    settings: LmSettings

    def __init__(
        self,
        settings: LmSettings,
        data: Dataset[Tensor],
        held_out: Dataset[Tensor] | None = None,
        most_passes: float | None = None,
    ) -> None:
        super().__init__(settings, data, held_out)
        self.most_passes = most_passes

    def build_model(self) -> LanguageModel:
        """Return the transformer of the settings."""
        return LanguageModel(self.settings)

    def phases(self, training: TrainingSettings, effective_batch: int) -> Sequence[Phase]:
        """Return the phase of the settings, as far as the passes over the text allow."""
        (phase,) = super().phases(training, effective_batch)
        if self.most_passes is None:
            return [phase]
        most = math.ceil(self.most_passes * len(self.data) / effective_batch)
        return [replace(phase, steps=min(phase.steps, most))]

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the decoder layers."""
        return [module for module in model.modules() if isinstance(module, DecoderLayer)]

    def flops_per_sample(self, model: nn.Module) -> float:
        """Return the model FLOPs of ``context`` tokens, as :func:`flops_per_token` counts them."""
        del model
        return float(self.settings.context * flops_per_token(self.settings))

    def loss(self, model: LanguageModel, batch: Tensor, context: StepContext) -> Loss:
        """Return the summed cross-entropy, in nats, of ``batch[:, 1:]``, int64 ``[B, L + 1]``."""
        del context
        states, targets = model.states(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        total = linear_cross_entropy(states, model.output, targets)
        return Loss(total=total, weight=targets.numel())


def build_task(settings: Any, run_dir: RunDirectory | None) -> LanguageModelTask:
    """Return the training on a run's tokens; without a run, on random tokens.

    Raises:
        ConfigError: damaged tokens, a text that is too short, or a prompt for the sample that the
            tokenizer cannot encode; reported before the training instead of after it.

    """
    if run_dir is None:
        return random_task(settings.model)
    folder = run_folder(run_dir)
    folder.check()
    folder.tokenizer().encode(settings.sample.prompt)
    model = model_of(folder, settings.model)
    first = {"train": validation_tokens(folder, settings.data.validation_share), "held_out": 0}
    for split, number in folder.index().tokens.items():
        if (number := number - first[split]) <= model.context:
            raise CorpusError(
                f"the {split} text has {number} tokens{_without(first[split])}; a sample needs "
                f"model.context + 1 = {model.context + 1}: give more text or a shorter context"
            )
    train = PackedTokens(folder, "train", model.context, first["train"])
    validation = PackedTokens(folder, "train", model.context, end=first["train"])
    passes = settings.data.most_passes
    return LanguageModelTask(model, train, validation if len(validation) else None, passes)


def _without(validation: int) -> str:
    return f" without the {validation} of data.validation_share" if validation else ""


def build_random_task(settings: Any, run_dir: RunDirectory | None) -> LanguageModelTask:
    """Return the training on the random tokens of the settings."""
    del run_dir
    data = settings.data
    return random_task(settings.model, data.samples, data.held_out, data.seed)


def random_task(
    model: LmSettings, samples: int = 100_000, held_out: int = 256, seed: int = 0
) -> LanguageModelTask:
    """Return a training on random sequences."""
    size = (model.vocabulary, model.context)
    return LanguageModelTask(
        model,
        RandomTokens(*size, samples, seed),
        RandomTokens(*size, held_out, seed, held_out=True),
    )
