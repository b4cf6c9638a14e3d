"""Training task: the model, data, loss and evaluation that an experiment supplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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


class Loss(NamedTuple):
    """The loss of one micro-batch as a sum, so that any split gives the same gradient.

    ``total`` (scalar, with gradient) is summed over the micro-batch, ``weight`` is how many
    samples or tokens it sums over; the step minimises ``sum(total) / sum(weight)`` over all
    micro-batches of all workers. ``metrics`` are sums over the same weight, without gradient.
    """

    total: Tensor
    weight: float | Tensor
    metrics: Mapping[str, Tensor] = {}


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
    #: ``training.compile`` takes the loss into the model's graph; not where it is a long loop
    compile_loss: bool = True
    #: what ``Loss.weight`` counts
    counts: Literal["samples", "tokens"] = "samples"

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, on the CPU, freshly initialised; the seed is set before the call."""

    @abstractmethod
    def build_dataset(self) -> Dataset[Any]:
        """The training samples: map-style, or an ``IterableDataset``.

        A stream is read in its own order, by every worker, and begun again at its end; each
        sample goes into one batch of one worker. Work on a sample belongs into ``collate``,
        which sees only the worker's own.
        """

    def build_eval_dataset(self) -> Dataset[Any] | None:
        """Held-out samples, map-style: their mean loss and metrics are ``eval_loss``, ..."""
        return None

    @abstractmethod
    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        """The summed loss of a micro-batch; ``model`` is what ``build_model`` made.

        The batch is on the model's device already.
        """

    def collate(self) -> Callable[[list[Any]], Any] | None:
        """How samples become a batch; ``None`` means PyTorch's default."""
        return None

    def lengths(self) -> Tensor | None:
        """The length of each training sample, int64 ``[samples]``; None where all are alike.

        Of a map-style dataset that is shuffled: each step then takes samples of similar lengths,
        for ``collate`` to pad little.
        """
        return None

    def shortened(self) -> tuple[TrainTask, str] | None:
        """The same task with shorter samples, and how short; None where they cannot be shorter.

        What ``on_oom: [shorten]`` asks for.
        """
        return None

    def phases(self, training: TrainingSettings, effective_batch: int) -> Sequence[Phase]:
        """The run as phases; by default one, from ``training.steps`` or ``training.epochs``."""
        steps = training.steps
        if steps is None:
            epochs = training.epochs or 1
            samples: int = len(self.build_dataset())  # type: ignore[arg-type]
            steps = -(-samples * epochs // effective_batch)
        return [Phase("train", steps, effective_batch, training.learning_rate)]

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The repeated blocks of the model, such as a transformer's layers.

        ``training.gradient_checkpointing`` recomputes their activations one block at a time,
        ``scaling.strategy=fsdp`` gathers their weights one block at a time.
        """
        del model
        return ()

    def flops_per_sample(self, model: nn.Module) -> float | None:
        """Floating-point operations of a sample's forward and backward; None where not known.

        What the model asks for, without recomputation: model FLOPs utilisation is counted so.
        """
        del model
        return None

    def metadata(self) -> Mapping[str, str]:
        """What is stored beside the trained weights, to build the model again."""
        return {}

    def evaluate(self, model: Any, device: torch.device, batch_size: int) -> Mapping[str, float]:
        """Further measures, without gradient: rows ``eval_<name>`` beside those of the loss.

        Every worker calls it and has to come to the same. ``batch_size`` is how many samples
        a forward may take; it shrinks when the device runs out of memory.
        """
        del model, device, batch_size
        return {}
