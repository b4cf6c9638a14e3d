"""Data parallelism: replicated (DDP) or sharded (FSDP2) models, and exchanges of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from raypipe.training import compilation, precision
from raypipe.training.recomputation import recompute_blocks

if TYPE_CHECKING:
    from raypipe.training.batching import BatchPlan
    from raypipe.training.job import Worker
    from raypipe.training.settings import TrainStageSettings
    from raypipe.training.task import TrainTask

# torch before 2.13 uses the second name
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


class ModelCall(nn.Module):
    """Wrapper whose ``forward(function, *arguments)`` is ``function(model, *arguments)``.

    DDP and FSDP thus see a single forward pass, whichever methods of the model a loss or an
    evaluation calls.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's result; FSDP's hooks find tensors in tuples and mappings."""
        return function(self.model, *arguments)


def is_sharded(settings: TrainStageSettings, worker: Worker) -> bool:
    """Whether each worker holds a shard of the model; a single worker holds the full model."""
    return settings.scaling.strategy == "fsdp" and worker.workers > 1


def wrap(
    model: nn.Module, task: TrainTask, settings: TrainStageSettings, worker: Worker
) -> ModelCall | DistributedDataParallel:
    """Return the model on its device with recomputation, compilation and data parallelism.

    A sharded model moves to the device block by block and need not fit on one device.

    Raises:
        ValueError: a setting needs blocks and the task defines none.

    """
    training = settings.training
    sharded = is_sharded(settings, worker)
    blocks = list(task.blocks(model))
    recompute = training.gradient_checkpointing
    if not blocks and (recompute or "gradient_checkpointing" in settings.on_oom):
        key = "training.gradient_checkpointing = true" if recompute else "on_oom"
        raise ValueError(f"{key}: this task names no blocks to recompute (TrainTask.blocks)")
    if recompute:
        blocks = recompute_blocks(model, blocks, training.recompute)
    if training.compile:
        compilation.compile_blocks(blocks or [model], training.compile_mode)
    call = ModelCall(model)
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


@contextmanager
def gradient_sync(module: ModelCall | DistributedDataParallel, wanted: bool) -> Iterator[None]:
    """Enable or disable the gradient exchange of DDP's backward passes in the body.

    FSDP exchanges in every pass: otherwise each worker would keep the whole gradient until the
    last one.
    """
    if isinstance(module, DistributedDataParallel) and not wanted:
        with module.no_sync():
            yield
    else:
        yield


@contextmanager
def evaluating(module: ModelCall | DistributedDataParallel) -> Iterator[ModelCall]:
    """Yield the model in eval mode, without gradients; only FSDP's weights are exchanged."""
    call: ModelCall = module.module if isinstance(module, DistributedDataParallel) else module
    call.eval()
    try:
        with torch.no_grad():
            yield call
    finally:
        call.train()
        if isinstance(call, FSDPModule):
            call.reshard()


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model after the body, such as the means of a batch normalization.

    Those that the body creates or resizes, such as caches, stay.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            if name in kept and buffer.shape == kept[name].shape:
                buffer.copy_(kept[name])


def batch_norm_warning(model: nn.Module, plan: BatchPlan) -> str | None:
    """Return a warning if a step is split and the model normalizes over the batch, else None."""
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if not names or (plan.accumulation == 1 and plan.workers == 1):
        return None
    return (
        f"{names[0]} is a batch normalization: its statistics are those of a micro-batch of "
        f"{plan.micro_batch} on one worker, so the result depends on training.micro_batch and "
        "scaling.workers; use layer or group normalization"
    )


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local part of each tensor on this worker."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def shard_rows(tensor: DTensor) -> list[int]:
    """Return the length of each worker's part along the first dimension, as FSDP cuts it."""
    workers = tensor.device_mesh.size()
    each = -(-len(tensor) // workers)  # as torch.chunk
    return [max(0, min(each, len(tensor) - worker * each)) for worker in range(workers)]


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, on every worker."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_reduce(sums: Mapping[str, Tensor], workers: int) -> dict[str, Tensor]:
    """Return the sums over all workers, in one exchange."""
    if workers == 1:
        return dict(sums)
    names = sorted(sums)
    packed = torch.stack([sums[name] for name in names])
    dist.all_reduce(packed)
    return dict(zip(names, packed.unbind(), strict=True))


def from_rank_0(value: Any, worker: Worker) -> Any:
    """Return the value of rank 0, on every worker."""
    if worker.workers == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=worker.device)
    return values[0]


def gather(value: Any, workers: int) -> list[Any]:
    """Return the values of all workers, on every worker."""
    if workers == 1:
        return [value]
    values: list[Any] = [None] * workers
    dist.all_gather_object(values, value)
    return values
