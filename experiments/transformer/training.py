"""Training of the transformer: the mean cross-entropy or squared error of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from experiments.transformer.model import (
    PADDING,
    EncoderLayer,
    Transformer,
    TransformerSettings,
    flops_per_sample,
)
from raypipe.training.keyed_random import normal, words
from raypipe.training.task import Loss, StepContext, TrainTask

#: the model's inputs, then the target: a class, int64, or a number
Sample = tuple[Tensor, ...]

_NUMBERS, _IDS, _RULE = range(3)


@dataclass(frozen=True)
class RandomSamples(Dataset[Sample]):
    """Random sequences or table rows with a rule to learn.

    Each value of each feature, or token, has an effect on each output, and a sample's effects are
    added up. The target is the output with the largest sum, or for a regression the sum. Sample
    ``i`` depends on ``(seed, first + i)`` alone, the effects on the seed: a held-out set of the
    same rule begins where the training set ends. Numeric features are standard normal, categories
    and tokens uniform; a sequence has ``length`` tokens, up to half of them padding.
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
        """The samples of a batch in one draw, which is what PyTorch's loader asks for.

        Raises:
            IndexError: an index outside [0, samples).

        """
        if not all(0 <= index < self.samples for index in indices):
            raise IndexError(f"sample {indices} of {self.samples}")
        numbers = self.first + torch.tensor(indices)
        *inputs, scores = (
            self._sequences(numbers) if self.settings.vocabulary else self._rows(numbers)
        )
        regression = self.settings.kind == "regression"
        target = scores[:, 0].float() if regression else scores.argmax(1)
        return list(zip(*inputs, target, strict=True))

    def _sequences(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        s = self.settings
        draws = words(self.seed, _IDS, numbers, 1 + s.length)
        lengths = s.length - (draws[:, :1] * (1 + s.length // 2) >> 32)
        real = torch.arange(s.length) < lengths
        ids = torch.where(real, 1 + (draws[:, 1:] * (s.vocabulary - 1) >> 32), PADDING)
        total = (self._effects[ids] * real[..., None]).sum(1)
        return ids, total / lengths.sqrt()

    def _rows(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.settings
        sizes = torch.tensor(s.categories, dtype=torch.int64)
        numeric = normal(self.seed, _NUMBERS, numbers, s.numeric)
        categories = words(self.seed, _IDS, numbers, len(sizes)) * sizes >> 32
        effects = self._effects[s.numeric + sizes.cumsum(0) - sizes + categories]
        total = (numeric[..., None] * self._effects[: s.numeric]).sum(1) + effects.sum(1)
        return numeric, categories, total / (s.tokens - 1) ** 0.5

    @cached_property
    def _effects(self) -> Tensor:
        """The effects, a row each: of numeric features, then of each category or token.

        Those of a feature's categories, and of the tokens, have mean zero, so that no class is
        preferred. In double precision a sample's sum does not depend on the batch it is in.
        """
        s = self.settings
        sizes = (s.numeric, 1, s.vocabulary - 1) if s.vocabulary else (s.numeric, *s.categories)
        rows = torch.arange(sum(sizes))
        effects = normal(self.seed, _RULE, rows, s.outputs, torch.float64)
        numeric, *ids = effects.split(sizes)
        return torch.cat([numeric, *(part - part.mean(0) for part in ids)])


class TransformerTask(TrainTask):
    """Classification or regression; a sample is a tuple of the model's inputs and the target.

    Sequences are ``(ids, target)``, rows ``(numeric, categories, target)``, as
    :class:`~experiments.transformer.model.Transformer` describes them. ``deviation`` is the unit of
    a standardised target: with it the errors are measured in the target's own.
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
        """The transformer of the settings."""
        return Transformer(self.settings)

    def metadata(self) -> Mapping[str, str]:
        """The settings of the model."""
        return {"model": self.settings.model_dump_json()}

    def build_dataset(self) -> Dataset[Sample]:
        """The samples to train on."""
        return self.data

    def build_eval_dataset(self) -> Dataset[Sample] | None:
        """The held-out samples."""
        return self.held_out

    def collate(self) -> Callable[[list[Sample]], Sample]:
        """Sequences are padded to the longest of the batch."""
        return pad if self.settings.vocabulary else default_collate

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The encoder layers."""
        return [module for module in model.modules() if isinstance(module, EncoderLayer)]

    def flops_per_sample(self, model: nn.Module) -> float:
        """As :func:`~experiments.transformer.model.flops_per_sample` counts them."""
        del model
        return float(flops_per_sample(self.settings))

    def loss(self, model: nn.Module, batch: Sample, context: StepContext) -> Loss:
        """The cross-entropy in nats, and how many are right; or the squared error, and errors."""
        del context
        *inputs, target = batch
        outputs = model(*inputs)
        if outputs.dtype != torch.float64:  # under autocast they are of half precision
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
    """Sequences of ids and their targets as a batch, as long as its longest sequence."""
    ids, targets = zip(*samples, strict=True)
    return pad_sequence(list(ids), batch_first=True, padding_value=PADDING), torch.stack(targets)
