"""Recording of a training step: the task's real model and loss, with no weights and no card."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, default_collate

from raypipe.cards.cuda_rules import CudaRules
from raypipe.cards.recorder import Recorder, Recording, recorded_resizes, replaced
from raypipe.errors import ConfigError, message_of
from raypipe.training import evaluation, optimizer, parallel, precision
from raypipe.training import model as training_model
from raypipe.training.loader import longest_first, over_leaves
from raypipe.training.optimizer import Update
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import Loss, StepContext, TrainTask

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
    with _without_values(task), _pretended_mesh(_sharding_workers(case)) as mesh:
        return _record(task, case, _batch(task, case.micro_batch), mesh)


def has_blocks(task: TrainTask) -> bool:
    """Whether a task names blocks of its model. Raises ConfigError, as ``record`` does."""
    with _without_values(task), FakeTensorMode(allow_non_fake_inputs=True):
        return any(True for _ in task.blocks(task.build_model()))


@contextmanager
def _without_values(task: TrainTask) -> Iterator[None]:
    """Explain failures of a task in the body, and keep the random numbers of the process."""
    try:
        with _quiet(), torch.random.fork_rng([]):
            yield
    except ConfigError:
        raise
    except Exception as error:  # a user's model may raise anything
        reason, _, _ = message_of(error).partition("\n")
        raise ConfigError(
            f"{type(task).__name__}: cannot be predicted, since a step of it fails without values "
            f"({reason}); measure it on the card (`raypipe fit` without --card)"
        ) from error


def _record(
    task: TrainTask,
    case: StepCase,
    batch: Any,
    mesh: Callable[..., DeviceMesh],
) -> Recording:
    uncompiled = case.settings.training.model_copy(update={"compile": False})
    settings = case.settings.model_copy(update={"training": uncompiled})
    worker = Worker(0, _DEVICE, _sharding_workers(case))
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _rules(case.compute_capability):
        fake = over_leaves(batch, lambda leaf: mode.from_tensor(leaf) if _is(leaf) else leaf)
        model = task.build_model()
        precision.store(model, uncompiled.weights)
        # a fake model cannot move, and the mesh was made with values
        with (
            replaced(nn.Module, "to", _stay),
            replaced(training_model, "init_device_mesh", mesh),
            replaced(precision, "sharded", partial(_on_card, precision.sharded)),
        ):
            module = training_model.wrap(model, task, settings, worker)
        update = Update(model, task.optimizer(model, uncompiled), uncompiled, _DEVICE)
        module.train()
        recorder.adopt([*model.parameters(), *model.buffers()], "parameters")
        model.register_forward_hook(partial(_after_model, recorder))
        context = StepContext(case.step, case.phase, settings.training.seed)
        with recorded_resizes(recorder), recorder:
            step = _Step(recorder, task, module, model, update, settings, context)
            step.run(fake, 1)  # creates the state of the optimizer
            recorder.recording.kernels.clear()
            step.run(fake, case.accumulation)
    return recorder.recording.in_order()


def _after_model(recorder: Recorder, module: nn.Module, inputs: Any, output: Any) -> None:
    """Count the output of the model, and what follows it, as logits and loss."""
    del module, inputs
    if recorder.part == "activations":  # not in a recomputation
        recorder.name(filter(_is, tree_leaves(output)), "logits and loss")
        recorder.part = "logits and loss"


@dataclass(frozen=True)
class _Step:
    """An optimizer step, as the training loop does it."""

    recorder: Recorder
    task: TrainTask
    module: Any
    model: nn.Module
    update: Update
    settings: TrainStageSettings
    context: StepContext

    def run(self, batch: Any, micro_batches: int) -> None:
        recorder, sums = self.recorder, dict[str, Tensor]()
        for number in range(micro_batches):
            recorder.section = "further" if number else "first"
            begun = len(recorder.recording.events)
            loss = self._forward_backward(batch, exchange=number + 1 == micro_batches)
            evaluation.add(sums, loss, _DEVICE)
            del loss
            grown = [p.grad for p in self.model.parameters() if p.grad is not None]
            recorder.name(grown, "gradients")
            recorder.recording.span = begun, len(recorder.recording.events)
        recorder.section = "update"
        self.update.step(1e-4, self.context.phase.samples / sums["weight"], norm=False)
        states = self.update.optimizer.state.values()
        kept = (each for values in states for each in values.values() if _is(each))
        recorder.name(kept, "optimizer state")

    def _forward_backward(self, batch: Any, *, exchange: bool) -> Loss:
        recorder = self.recorder
        recorder.part = "batch"
        batch = over_leaves(batch, lambda leaf: torch.empty_like(leaf) if _is(leaf) else leaf)
        recorder.part = "activations"
        with parallel.gradient_sync(self.module, exchange):
            training = self.settings.training
            recompute = training.gradient_checkpointing
            with precision.autocast(training.precision, _DEVICE, recompute=recompute):
                loss: Loss = self.module(self.task.loss, batch, self.context)
            recorder.part, recorder.backward = "temporaries", True
            self.update.backward(loss.total * (1 / self.context.phase.samples))
            recorder.backward = False
        return loss


@contextmanager
def _rules(compute_capability: float | None) -> Iterator[None]:
    if compute_capability is None:
        yield
        return
    on_card = partial(_on_card, optimizer.product_type)
    with CudaRules(compute_capability), replaced(optimizer, "product_type", on_card):
        yield


def _batch(task: TrainTask, size: int) -> Any:
    """Return a batch of the longest samples, on the host."""
    dataset, lengths = task.build_dataset(), task.lengths()
    if isinstance(dataset, IterableDataset):
        samples = list(islice(dataset, size))
    else:
        length: int = len(dataset)  # type: ignore[arg-type]
        chosen = range(length) if lengths is None else longest_first(lengths)
        samples = [dataset[int(chosen[number % length])] for number in range(size)]
    return (task.collate() or default_collate)(samples)


def _on_card(policy: Callable[..., Any], *given: Any) -> Any:
    return policy(*given[:-1], torch.device("cuda"))


def _stay(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return module


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _sharding_workers(case: StepCase) -> int:
    return case.workers if case.settings.scaling.strategy == "fsdp" else 1


@contextmanager
def _pretended_mesh(workers: int) -> Iterator[Callable[..., DeviceMesh]]:
    """Open a process group whose other workers do not exist; yield what returns its mesh."""
    if workers == 1:
        yield init_device_mesh
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    try:
        mesh = init_device_mesh(_DEVICE.type, (workers,))
        yield lambda *_: mesh
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings about the missing card."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
