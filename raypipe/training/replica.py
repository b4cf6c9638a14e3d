"""The model of a worker: built, initialized, compiled, and distributed over the workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from raypipe.training import compilation, parallel, precision
from raypipe.training.batching import BatchPlan
from raypipe.training.job import Report, TrainingJob
from raypipe.training.parallel import Worker
from raypipe.training.recomputation import recompute_blocks
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import Loss, TrainTask

# fill a tensor with random numbers
_DRAWS = (
    *(torch.Tensor.normal_, torch.Tensor.uniform_),
    *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_),
)
# depend on the form of a tensor, not on its values; some are attributes
_FORM = frozenset(
    [
        *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_meta", "is_leaf"),
        *("size", "dim", "numel", "is_floating_point", "is_complex", "__len__", "__hash__"),
        *(
            "empty_like",
            "zeros_like",
            "ones_like",
            "new_empty",
            "new_zeros",
            "new_ones",
            "new_full",
        ),
        *("new_tensor", "grad_fn"),
    ]
)

# torch before 2.13 uses the second name
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


class Replica(NamedTuple):
    """A model; the module that computes with it, on its device; and the loss that the module takes.

    ``model`` shares its weights with ``module``.
    """

    model: nn.Module
    module: parallel.ModelCall | DistributedDataParallel
    loss: Callable[..., Loss]


def build(job: TrainingJob, worker: Worker, report: Report) -> Replica:
    """Return the model of a job on this worker, with the same initial weights on all workers.

    Raises:
        ValueError: a setting needs blocks and the task defines none, or unsuitable ones.
        ConfigError: the weights of ``training.init_from`` do not fit.

    """
    task, training = cast("TrainTask", job.task), job.settings.training
    sharded = parallel.is_sharded(job.settings, worker)
    model = _initialized(task, training.seed, worker, sharded=sharded)
    if job.initial is not None:
        job.initial.load_into(model)
    precision.store(model, training.weights)
    if training.precision == "fp8":
        precision.to_float8(model, task.blocks(model))
    if warning := _batch_norm_warning(model, job.plan.for_workers(worker.workers)):
        report(f"WARNING: {warning}")
    loss = task.loss
    if training.compile and task.compile_loss:
        loss = compilation.compiled(task.loss, training.compile_mode)
    return Replica(model, wrap(model, task, job.settings, worker), loss)


def wrap(
    model: nn.Module, task: TrainTask, settings: TrainStageSettings, worker: Worker
) -> parallel.ModelCall | DistributedDataParallel:
    """Return the model on its device with recomputation, compilation and data parallelism.

    A sharded model moves to the device block by block and need not fit on one device.

    Raises:
        ValueError: a setting needs blocks and the task defines none.

    """
    training = settings.training
    sharded = parallel.is_sharded(settings, worker)
    blocks = list(task.blocks(model))
    recompute = training.gradient_checkpointing
    if not blocks and (recompute or "gradient_checkpointing" in settings.on_oom):
        key = "training.gradient_checkpointing = true" if recompute else "on_oom"
        raise ValueError(f"{key}: this task names no blocks to recompute (TrainTask.blocks)")
    if recompute:
        blocks = recompute_blocks(model, blocks, training.recompute)
    if training.compile:
        compilation.compile_blocks(blocks or [model], training.compile_mode)
    call = parallel.ModelCall(model)
    if not sharded:
        call.to(worker.device)
    if worker.workers == 1:
        return call
    if sharded:
        mesh = init_device_mesh(worker.device.type, (worker.workers,))
        policy = precision.sharded(training.precision, worker.device)
        for block in blocks:
            own = policy if _is_single_precision(block) else MixedPrecisionPolicy()
            fully_shard(block, mesh=mesh, mp_policy=own)
        fully_shard(call, mesh=mesh)
        return call
    options: dict[str, Any] = {
        _SYNC_BUFFERS: False
    }  # each worker keeps its own buffers; rank 0's are saved
    if not task.unused_parameters:
        # DDP makes these views of its buckets, and they stay: no pass needs a second copy
        for parameter in call.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return DistributedDataParallel(
        call,
        device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
        find_unused_parameters=task.unused_parameters,
        gradient_as_bucket_view=True,
        **options,
    )


def _is_single_precision(block: nn.Module) -> bool:
    """Whether 16-bit weights may take the place of a block's weights in a forward pass."""
    return all(p.dtype == torch.float32 for p in block.parameters()) and not any(
        isinstance(module, _BatchNorm) for module in block.modules()
    )


def _batch_norm_warning(model: nn.Module, plan: BatchPlan) -> str | None:
    """Return a warning if a step is split and the model normalizes over the batch, else None."""
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if not names or (plan.accumulation == 1 and plan.workers == 1):
        return None
    return (
        f"{names[0]} is a batch normalization: its statistics are those of a micro-batch of "
        f"{plan.micro_batch} on one worker, so the result depends on training.micro_batch and "
        "scaling.workers; use layer or group normalization"
    )


def _initialized(task: TrainTask, seed: int, worker: Worker, *, sharded: bool) -> nn.Module:
    """Return the newly initialized model on the CPU.

    Only rank 0 draws weights, on one thread. The others receive them: from DDP, or here if the
    model is sharded. All of them leave with rank 0's state of the generator.
    """
    torch.manual_seed(seed)
    if worker.rank == 0:
        model = task.build_model()
    else:
        before = torch.get_rng_state()
        with Undrawn() as undrawn:
            model = task.build_model()
        if undrawn.were_used or not torch.equal(torch.get_rng_state(), before):
            torch.manual_seed(seed)
            model = task.build_model()
    if worker.workers == 1:
        return model
    for each in model.parameters() if sharded else ():
        dist.broadcast(whole := each.detach().to(worker.device), src=0)
        if worker.rank:
            each.data.copy_(whole)
    state = torch.get_rng_state().to(worker.device)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())
    return model


class Undrawn(TorchFunctionMode):
    """While open, parameters are not filled with random numbers.

    ``were_used`` is whether something else was computed from them, such as a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.were_used = False
        self._undrawn: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        first = args[0] if args else given.get("tensor")
        if func in _DRAWS and isinstance(first, nn.Parameter):
            self._undrawn.append(first)
            return first
        inputs = [each for each in (*args, *given.values()) if isinstance(each, nn.Parameter)]
        if _only_writes(func):
            inputs = [each for each in inputs if each is not first]
        if not _is_about_form(func):
            self.were_used |= any(each is other for each in inputs for other in self._undrawn)
        return func(*args, **given)


def _only_writes(func: Any) -> bool:
    """Whether a function changes its first argument in place."""
    return bool(re.search("[^_]_$", func.__name__))


def _is_about_form(func: Any) -> bool:
    """Whether a function depends on the form of its arguments, not on their values."""
    attribute = getattr(func, "__self__", None)  # of a tensor's attribute, func is its __get__
    return func.__name__ in _FORM or getattr(attribute, "__name__", None) in _FORM
