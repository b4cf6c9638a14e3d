"""Check that a loss is a sum: over some samples twice it is twice the sum over them once.

A mean stays the same, and would not be equal for every split into micro-batches.
"""

from __future__ import annotations

import inspect
from bdb import BdbQuit
from contextlib import nullcontext
from math import isclose, nan
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from raypipe.errors import Trace, UnitError
from raypipe.training import parallel, precision
from raypipe.training.loader import over_leaves
from raypipe.training.parallel import ModelCall
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import StepContext, TrainTask, add_loss

#: relative difference of equal values: half precision rounds differently in a larger batch
_TOLERANCE = 0.01


def refuse_means(
    task: TrainTask,
    training: TrainingSettings,
    device: torch.device,
    module: ModelCall | DistributedDataParallel,
    batch: Any,
    samples: int,
    context: StepContext,
) -> None:
    """Reject a task whose loss weighs samples, but has a total or a metric that is a mean.

    The loss of one or two samples is compared with that of the same samples twice, in eval mode and
    without gradients. Random-number states and buffers stay as they are. A loss that cannot be
    judged passes: one that draws random numbers in eval mode or raises an error, and one of a batch
    that has anything but tensors with an entry per sample.

    Args:
        task: the task.
        training: its settings.
        device: the device of the micro-batch.
        module: the model, which must not be sharded.
        batch: a micro-batch.
        samples: its number of samples.
        context: the context of the loss.

    Raises:
        UnitError: a total or a metric is a mean; its frame is the line of the task.

    """
    rows = [0, 1] if samples >= 4 else [0]  # twice as many are a micro-batch at most

    def taken(leaf: Any, rows: list[int]) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == samples:
            return leaf[rows]
        if leaf is None or isinstance(leaf, str):
            return leaf
        raise TypeError("not a tensor with an entry per sample")

    def sums(rows: list[int]) -> dict[str, float]:
        found: dict[str, Tensor] = {}
        part = over_leaves(batch, lambda leaf: taken(leaf, rows))
        add_loss(found, call(task.loss, part, context), device)
        return {name: value.item() for name, value in found.items()}

    def random_states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]

    gpus = [device] if device.type == "cuda" else []
    with (
        parallel.evaluating(module) as call,
        parallel.same_buffers(call),
        torch.random.fork_rng(gpus),
        precision.autocast(training.precision, device),
        # other sizes would be compiled; the stance is taken as soon as it is made
        torch.compiler.set_stance("force_eager") if training.compile else nullcontext(),
    ):
        before = random_states()
        try:
            once, again, twice = sums(rows), sums(rows), sums(rows + rows)
        except BdbQuit:  # the user ended the debugger
            raise
        except Exception:  # the loss of the step raised none: it needs the whole batch
            return
        drew = not all(map(torch.equal, before, random_states()))

    def equal(other: dict[str, float], name: str, times: int = 1) -> bool:
        return isclose(other.get(name, nan), times * once[name], rel_tol=_TOLERANCE)

    if drew or not equal(twice, "weight", 2):
        return
    for name, value in once.items():
        if value and equal(again, name) and equal(twice, name):
            part = "total" if name == "loss" else f"metrics[{name!r}]"
            message = (
                f"{type(task).__name__}.loss: Loss.{part} is a mean, but must be a sum, as "
                f"Loss.weight is: {len(rows)} sample(s) give {value:.4g} with weight "
                f"{once['weight']:g}, the same twice give {twice[name]:.4g} with weight "
                f'{twice["weight"]:g}; take reduction="sum", or return Loss.mean(mean, weight)'
            )
            raise UnitError("loss", "error", message, trace=Trace(message, _place(task)))


def _place(task: TrainTask) -> str:
    """Return the place of a task's loss: its file, its first line and its name."""
    code = getattr(inspect.unwrap(task.loss), "__code__", None)
    if code is None:
        return f"{type(task).__name__}.loss"
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
