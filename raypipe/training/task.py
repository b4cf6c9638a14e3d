"""What an experiment supplies to the training core: model, data, loss, evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from raypipe.training.settings import TrainingSettings


@dataclass(frozen=True)
class Phase:
    """A stretch of steps with a batch size and a learning rate of its own.

    The warm-up and the schedule of the settings run once over each phase.
    """

    name: str
    steps: int
    samples: int
    learning_rate: float


@dataclass(frozen=True)
class StepContext:
    """Where in the run a loss is taken."""

    step: int
    phase: Phase
    seed: int


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch as a sum, so that any split gives the same gradient.

    ``total`` (scalar, with gradient) is summed over the micro-batch, ``weight`` is how many
    samples or tokens it sums over; the step minimises ``sum(total) / sum(weight)`` over all
    micro-batches of all workers. ``metrics`` are sums over the same weight, without gradient.
    """

    total: Tensor
    weight: float | Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class SampleIds(Dataset[int]):
    """The data of a task that generates its samples: sample ``i`` is the number ``i``.

    The loss draws the sample from ``(seed, i)``, on the model's own device. Sample ``i`` of a
    run is the same whatever the workers and the micro-batch.
    """

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: int) -> int:
        return index


class TrainTask(ABC):
    """A training problem. Subclasses are picklable: they hold settings, not tensors.

    It runs unchanged on one CPU, one GPU or many GPUs; devices, precision, accumulation,
    workers, checkpoints and out-of-memory handling are the loop's business.
    """

    #: shuffle the dataset anew each epoch (keyed by the seed)
    shuffle: bool = True
    #: some parameters get no gradient in some steps
    unused_parameters: bool = False

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, on the CPU, freshly initialised; the seed is set before the call."""

    @abstractmethod
    def build_dataset(self) -> Dataset[Any]:
        """The training samples, map-style."""

    @abstractmethod
    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        """The summed loss of a micro-batch; ``model`` is what ``build_model`` made.

        The batch is on the model's device already.
        """

    def collate(self) -> Callable[[list[Any]], Any] | None:
        """How samples become a batch; ``None`` means PyTorch's default."""
        return None

    def phases(self, training: TrainingSettings, effective_batch: int) -> Sequence[Phase]:
        """The run as phases; by default one, from ``training.steps`` or ``training.epochs``."""
        steps = training.steps
        if steps is None:
            epochs = training.epochs or 1
            samples: int = len(self.build_dataset())  # type: ignore[arg-type]
            steps = -(-samples * epochs // effective_batch)
        return [Phase("train", steps, effective_batch, training.learning_rate)]

    def checkpointed_modules(self, model: nn.Module) -> Iterable[nn.Module]:
        """The modules whose activations ``training.gradient_checkpointing`` recomputes."""
        del model
        return ()

    def metadata(self) -> Mapping[str, str]:
        """What is stored beside the trained weights, to build the model again."""
        return {}

    def evaluate(self, model: Any, device: torch.device) -> Mapping[str, float]:
        """Measures on held-out data, without gradient; empty means there are none."""
        del model, device
        return {}
