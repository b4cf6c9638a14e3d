"""Training of the language model: the mean cross-entropy of each next token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.lm_pretrain.model import DecoderLayer, LanguageModel, LmSettings, flops_per_token
from raypipe.training.keyed_random import words
from raypipe.training.task import Loss, StepContext, TrainTask

_TRAINING, _HELD_OUT = 0, 1


@dataclass(frozen=True)
class RandomTokens(Dataset[Tensor]):
    """Uniform tokens: nothing to learn, but all of the work of a step.

    Sample ``i``, int64 ``[context + 1]``, depends on ``(seed, held_out, i)`` alone.
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
        """The samples of a batch in one draw, which is what PyTorch's loader asks for.

        Raises:
            IndexError: an index outside [0, samples).

        """
        if not all(0 <= index < self.samples for index in indices):
            raise IndexError(f"sample {indices} of {self.samples}")
        stream = _HELD_OUT if self.held_out else _TRAINING
        draws = words(self.seed, stream, torch.tensor(indices), self.context + 1)
        return list((draws * self.vocabulary) >> 32)


class LanguageModelTask(TrainTask):
    """Next-token prediction; a sample is a sequence of ``context + 1`` tokens, int64.

    Both datasets are sent to the workers, so they hold where their tokens are, not the tokens.
    The evaluation's loss on the held-out ones is the logarithm of the perplexity.
    """

    counts = "tokens"

    def __init__(
        self,
        settings: LmSettings,
        data: Dataset[Tensor],
        held_out: Dataset[Tensor] | None = None,
    ) -> None:
        self.settings = settings
        self.data = data
        self.held_out = held_out

    def build_model(self) -> LanguageModel:
        """The transformer of the settings."""
        return LanguageModel(self.settings)

    def metadata(self) -> Mapping[str, str]:
        """The settings of the model."""
        return {"model": self.settings.model_dump_json()}

    def build_dataset(self) -> Dataset[Tensor]:
        """The sequences to train on."""
        return self.data

    def build_eval_dataset(self) -> Dataset[Tensor] | None:
        """The held-out sequences."""
        return self.held_out

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The decoder layers."""
        return [module for module in model.modules() if isinstance(module, DecoderLayer)]

    def flops_per_sample(self, model: nn.Module) -> float:
        """Model FLOPs of ``context`` tokens, as :func:`flops_per_token` counts them."""
        del model
        return float(self.settings.context * flops_per_token(self.settings))

    def loss(self, model: nn.Module, batch: Tensor, context: StepContext) -> Loss:
        """The cross-entropy of the tokens ``batch[:, 1:]``, int64 ``[B, L + 1]``, in nats."""
        del context
        logits = model(batch[:, :-1])
        if logits.dtype != torch.float64:  # under autocast they are of half precision
            logits = logits.float()
        targets = batch[:, 1:].flatten()
        total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        return Loss(total=total, weight=targets.numel())
