"""Training task: the model, data, loss and evaluation of an experiment."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from raypipe.training import optimizer
from raypipe.training.batching import ceil_div
from raypipe.training.job import JobTask
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainingSettings


@dataclass(frozen=True)
class StepContext:
    """Step, phase and seed for which a loss is computed."""

    step: int
    phase: Phase
    seed: int


class Loss(NamedTuple):
    """Loss of one micro-batch as a sum, so that any split gives the same gradient.

    ``total`` (scalar, with gradient) is summed over the micro-batch. ``weight`` is the number of
    samples or tokens in the sum. The step minimizes ``sum(total) / sum(weight)`` over all
    micro-batches of all workers. ``metrics`` are sums over the same weight, without gradient. A
    mean is refused; :meth:`mean` takes one.
    """

    total: Tensor
    weight: float | Tensor
    metrics: Mapping[str, Tensor] = {}

    @classmethod
    def mean(
        cls, value: Tensor, count: float | Tensor, metrics: Mapping[str, Tensor] | None = None
    ) -> Loss:
        """Return the loss whose mean over ``count`` samples or tokens is ``value``.

        ``metrics`` are means over the same samples or tokens.
        """
        sums = {name: mean * count for name, mean in (metrics or {}).items()}
        return cls(value * count, count, sums)


def add_loss(
    sums: dict[str, Tensor],
    loss: Loss,
    device: torch.device,
    *,
    counted: bool = True,
    weight_only: bool = False,
) -> None:
    """Add the weight of a loss to ``sums``, and its total and metrics, in float64."""
    values = {"weight": loss.weight}
    if not weight_only:
        values |= {"loss": loss.total, **loss.metrics}
    for name, value in values.items():
        if not isinstance(value, Tensor):  # filled on the device, which avoids a blocking copy
            value = torch.full((), value, device=device)
        value = value.detach().double()
        if not counted:
            value = torch.zeros_like(value)
        sums[name] = sums[name] + value if name in sums else value


class SampleIds(Dataset[int]):
    """Dataset of a task that generates its samples: sample ``i`` is the number ``i``.

    The loss draws the sample from ``(seed, i)`` on the model's device. Sample ``i`` of a run is
    the same for any number of workers and any micro-batch.
    """

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        return index


class TrainTask(JobTask, ABC):
    """Training problem. Subclasses must be picklable: they hold settings, not tensors.

    A task runs unchanged on one CPU, one GPU or many GPUs. The training loop handles devices,
    precision, accumulation, workers, checkpoints and out-of-memory errors.
    """

    #: reshuffle the dataset in each epoch (keyed by the seed)
    shuffle: bool = True
    #: whether some parameters get no gradient in some steps
    unused_parameters: bool = False
    #: whether ``training.compile`` also compiles the loss; False suits a loss with a long loop
    compile_loss: bool = True

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return a newly initialized model on the CPU; the seed is set before the call."""

    def build_dataset(self) -> Dataset[Any]:
        """Return the training samples: a map-style dataset or an ``IterableDataset``.

        By default a sample is its number, from which the loss generates it.
        Every worker reads a stream in its given order and restarts it at its end. Each sample
        goes into one batch of one worker. Put expensive per-sample work in ``collate``, which
        receives only the worker's own samples.
        """
        return SampleIds()

    def build_eval_dataset(self) -> Dataset[Any] | None:
        """Return the held-out samples (map-style), whose means are ``eval_loss``, ... or None."""
        return None

    @abstractmethod
    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        """Return the summed loss of a micro-batch; ``model`` is the result of ``build_model``.

        The batch is already on the model's device.
        """

    def collate(self) -> Callable[[list[Any]], Any] | None:
        """Return the function that turns samples into a batch; None for PyTorch's default."""
        return None

    def lengths(self) -> Tensor | None:
        """Return the length of each training sample, int64 ``[samples]``; None if all are equal.

        In a shuffled map-style dataset, each step then has samples of similar lengths, which
        reduces padding in ``collate``.
        """
        return None

    def phases(self, training: TrainingSettings, effective_batch: int) -> Sequence[Phase]:
        """Return the phases of the run; by default one, of ``training.steps`` or ``epochs``.

        A training can be continued with more steps if its phases are the beginning of those of the
        longer one.
        """
        steps = training.length
        if training.length_in == "epochs":
            dataset: Any = self.build_dataset()
            if not hasattr(dataset, "__len__"):
                raise ValueError(
                    f"training.epochs: the dataset is a stream ({type(dataset).__name__}), whose "
                    "length is not known; give training.steps instead"
                )
            steps = ceil_div(len(dataset) * training.length, effective_batch)
        return [Phase("train", steps, effective_batch, training.learning_rate)]

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the repeated blocks of the model, such as a transformer's layers.

        ``training.gradient_checkpointing`` recomputes their activations block by block,
        ``scaling.strategy=fsdp`` gathers their weights block by block, ``training.compile``
        compiles each block, and Muon updates their matrices.
        """
        del model
        return ()

    def optimizer(self, model: nn.Module, training: TrainingSettings) -> torch.optim.Optimizer:
        """Return the optimizer of the model's parameters; by default that of the settings.

        In each step, the rate of a group is that of the schedule times the group's initial ``lr``
        over ``training.learning_rate``. With ``scaling.strategy=fsdp`` parameters are ``DTensor``.
        """
        return optimizer.build(model, self.blocks(model), training)

    def flops_per_sample(self, model: nn.Module) -> float | None:
        """Return the FLOPs per sample of a forward and backward pass; None if unknown.

        Count the operations of the model without recomputation, as model FLOPs utilization does.
        """
        del model
        return None

    def metadata(self) -> Mapping[str, str]:
        """Return the metadata stored with the trained weights, for rebuilding the model."""
        return {}

    def evaluate(self, model: Any, device: torch.device, batch_size: int) -> Mapping[str, float]:
        """Return further measures, computed without gradients and logged as ``eval_<name>``.

        Every worker calls this and must return the same values. ``batch_size`` is the largest
        number of samples per forward pass; it shrinks when the device runs out of memory.
        """
        del model, device, batch_size
        return {}
