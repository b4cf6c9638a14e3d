"""The model of a worker: built, initialized, compiled, and distributed over the workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from raypipe.training import parallel, precision
from raypipe.training.job import Report, TrainingJob
from raypipe.training.parallel import Worker
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import Loss, TrainTask

_BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)
# torch before 2.13 uses the second name
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


def build(
    job: TrainingJob, worker: Worker, report: Report
) -> tuple[nn.Module, parallel.ModelCall | DistributedDataParallel, Callable[..., Loss]]:
    """Return the model of a job; the module that computes with its weights; and the loss it takes.

    All workers draw the same initial weights. They receive those of rank 0 all the same, in case
    that a task draws others: from DDP, or here if the model is sharded.

    Raises:
        ValueError: a setting needs blocks and the task defines none, or unsuitable ones.
        ConfigError: the weights of ``training.init_from`` do not fit.

    """
    task, training = cast("TrainTask", job.task), job.settings.training
    torch.manual_seed(training.seed)
    model = task.build_model()
    for parameter in model.parameters() if parallel.is_sharded(job.settings, worker) else ():
        whole = parameter.detach().to(worker.device)
        dist.broadcast(whole, src=0)
        parameter.data.copy_(whole)
    if job.initial is not None:
        job.initial.load_into(model)
    precision.store(model, training.weights)
    plan = job.plan.for_workers(worker.workers)
    names = [name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)]
    if names and plan.micro_batch < plan.effective_batch:
        report(
            f"WARNING: {names[0]} is a batch normalization: its statistics are those of a "
            f"micro-batch of {plan.micro_batch} on one worker, so the result depends on "
            "training.micro_batch and scaling.workers; use layer or group normalization"
        )
    loss = torch.compile(task.loss) if training.compile and task.compile_loss else task.loss
    return model, wrap(model, task, job.settings, worker), loss


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
    for block in blocks if recompute else ():  # Chen et al. 2016
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for block in (blocks or [model]) if training.compile else ():
        # by itself, so that equal blocks share one graph: the model as one graph takes several
        # times as long to compile, and is hardly faster
        block.forward = _boundary(torch.compile(block.forward))
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
    # each worker keeps its own buffers; rank 0's are saved
    options: dict[str, Any] = {_SYNC_BUFFERS: False}
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
        isinstance(module, _BATCH_NORMS) for module in block.modules()
    )


def _boundary(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that a compiled caller calls, instead of compiling it with itself."""

    @functools.wraps(compiled, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled(*arguments, **named)

    boundary: Callable[..., Any] = torch.compiler.disable(call, recursive=False)
    return boundary
