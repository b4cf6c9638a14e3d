"""Recording of a training step: the task's real model and loss, with no weights and no card."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import default_collate

from raypipe.cards.cuda_rules import CudaRules
from raypipe.cards.recorder import Recorder, Recording, recorded_resizes
from raypipe.errors import ConfigError, message_of
from raypipe.training import model as training_model
from raypipe.training import optimizer, parallel, precision
from raypipe.training.loader import longest_first, over_leaves
from raypipe.training.optimizer import Update
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import Loss, StepContext, TrainTask, add_loss

_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class StepCase:
    """The settings that decide a step's memory and kernels.

    ``step`` is the first of the phase, ``accumulation`` its micro-batches: 1, or 2 for more. The
    ``workers`` shard the model with ``settings.scaling.strategy`` fsdp.
    """

    settings: TrainStageSettings
    phase: Phase
    step: int
    micro_batch: int
    accumulation: int
    workers: int
    compute_capability: float | None


def record(task: TrainTask, case: StepCase) -> Recording:
    """Return the recording of an optimizer step, after a first one.

    Args:
        task: the training.
        case: the step.

    Raises:
        ConfigError: the task does something that needs the values of tensors, or a real device.

    """
    uncompiled = case.settings.training.model_copy(update={"compile": False})
    settings = case.settings.model_copy(update={"training": uncompiled})
    worker = Worker(0, _DEVICE, case.workers if settings.scaling.strategy == "fsdp" else 1)
    recorder = Recorder()
    with _without_values(task), ExitStack() as stack:
        batch = _batch(task, case.micro_batch)
        mesh = stack.enter_context(_pretended_mesh(worker.workers))
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if case.compute_capability is not None:
            on_card = partial(_on_card, optimizer.product_type)
            stack.enter_context(CudaRules(case.compute_capability))
            stack.enter_context(patch.object(optimizer, "product_type", on_card))
        fake = over_leaves(batch, lambda leaf: mode.from_tensor(leaf) if _is(leaf) else leaf)
        model = task.build_model()
        precision.store(model, uncompiled.weights)
        # a fake model cannot move, and the mesh was made with values
        with (
            patch.object(nn.Module, "to", lambda module, *_, **__: module),
            patch.object(training_model, "init_device_mesh", mesh),
            patch.object(precision, "sharded", partial(_on_card, precision.sharded)),
        ):
            module = training_model.wrap(model, task, settings, worker)
        update = Update(model, task.optimizer(model, uncompiled), uncompiled, _DEVICE)
        module.train()
        recorder.adopt([*model.parameters(), *model.buffers()], "parameters")
        context = StepContext(case.step, case.phase, settings.training.seed)
        with recorded_resizes(recorder), recorder:
            given = recorder, task, module, update, settings, context, fake
            _step(*given, 1)  # creates the state of the optimizer
            recorder.recording.kernels.clear()
            _step(*given, case.accumulation)
    return recorder.recording.in_order()


def has_blocks(task: TrainTask) -> bool:
    """Whether a task names blocks of its model. Raises ConfigError, as ``record`` does."""
    with _without_values(task), FakeTensorMode(allow_non_fake_inputs=True):
        return any(True for _ in task.blocks(task.build_model()))


@contextmanager
def _without_values(task: TrainTask) -> Iterator[None]:
    """Explain failures of a task in the body, and keep the random numbers of the process."""
    logging.disable(logging.WARNING)  # about the missing card
    try:
        with warnings.catch_warnings(action="ignore"), torch.random.fork_rng([]):
            yield
    except ConfigError:
        raise
    except Exception as error:  # a user's model may raise anything
        reason, _, _ = message_of(error).partition("\n")
        raise ConfigError(
            f"{type(task).__name__}: cannot be predicted, since a step of it fails without values "
            f"({reason}); measure it on the card (`raypipe fit` without --card)"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def _step(
    recorder: Recorder,
    task: TrainTask,
    module: Any,
    update: Update,
    settings: TrainStageSettings,
    context: StepContext,
    batch: Any,
    micro_batches: int,
) -> None:
    """Run an optimizer step, as the training loop does it."""
    sums, training = dict[str, Tensor](), settings.training
    for number in range(micro_batches):
        recorder.section = "further" if number else "first"
        begun = len(recorder.recording.events)
        own = over_leaves(batch, lambda leaf: torch.empty_like(leaf) if _is(leaf) else leaf)
        recompute = training.gradient_checkpointing
        with parallel.gradient_sync(module, number + 1 == micro_batches):
            with precision.autocast(training.precision, _DEVICE, recompute=recompute):
                loss: Loss = module(task.loss, own, context)
            recorder.backward = True
            update.backward(loss.total * (1 / context.phase.samples))
            recorder.backward = False
        del own
        add_loss(sums, loss, _DEVICE)
        del loss
        gradients = (p.grad for p in module.parameters() if p.grad is not None)
        recorder.name(gradients, "gradients")
        recorder.recording.span = begun, len(recorder.recording.events)
    recorder.section = "update"
    update.step(1e-4, context.phase.samples / sums["weight"], norm=False)
    states = update.optimizer.state.values()
    kept = (each for values in states for each in values.values() if _is(each))
    recorder.name(kept, "optimizer")


def _batch(task: TrainTask, size: int) -> Any:
    """Return a batch of the longest samples, on the host."""
    dataset, lengths = task.build_dataset(), task.lengths()
    length: int = len(dataset)  # type: ignore[arg-type]
    chosen = range(length) if lengths is None else longest_first(lengths)
    samples = [dataset[int(chosen[number % length])] for number in range(size)]
    return (task.collate() or default_collate)(samples)


def _on_card(policy: Callable[..., Any], *given: Any) -> Any:
    return policy(*given[:-1], torch.device("cuda"))


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


@contextmanager
def _pretended_mesh(workers: int) -> Iterator[Callable[..., DeviceMesh]]:
    """Open a process group whose other workers do not exist; yield what returns its mesh."""
    if workers == 1:
        yield init_device_mesh
        return
    dist.init_process_group("fake", rank=0, world_size=workers)
    try:
        mesh = init_device_mesh(_DEVICE.type, (workers,))
        yield lambda *_: mesh
    finally:
        dist.destroy_process_group()
