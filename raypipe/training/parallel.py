"""Data parallelism: replicated (DDP) or sharded (FSDP2) models, and their full state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX,
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

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
# full state by parameter name on rank 0's CPU: independent of the number of workers
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


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
    if recompute:  # Chen et al. 2016
        apply_activation_checkpointing(model, check_fn=set(blocks).__contains__)
        blocks = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    if training.compile:
        # FSDP gathers weights between the blocks, where a graph would break anyway
        for module in blocks if sharded and blocks else [model]:
            module.compile()
    call = ModelCall(model)
    if not sharded:
        call.to(worker.device)
    if worker.workers == 1:
        return call
    if sharded:
        mesh = init_device_mesh(worker.device.type, (worker.workers,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(call, mesh=mesh)
        return call
    options: dict[str, Any] = {
        _SYNC_BUFFERS: False
    }  # each worker keeps its own buffers; rank 0's are saved
    return DistributedDataParallel(
        call,
        device_ids=[worker.device.index] if worker.device.type == "cuda" else None,
        find_unused_parameters=task.unused_parameters,
        **options,
    )


@contextmanager
def gradient_sync(module: ModelCall | DistributedDataParallel, wanted: bool) -> Iterator[None]:
    """Enable or disable the gradient exchange of backward passes in the body."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
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


def from_rank_0(flags: Sequence[bool], worker: Worker) -> list[bool]:
    """Return the flags of rank 0, on every worker."""
    if worker.workers == 1:
        return list(flags)
    packed = torch.tensor(flags, dtype=torch.int32, device=worker.device)
    dist.broadcast(packed, src=0)
    return [bool(flag) for flag in packed.tolist()]


def gather(value: Any, workers: int) -> list[Any]:
    """Return the values of all workers, on every worker."""
    if workers == 1:
        return [value]
    values: list[Any] = [None] * workers
    dist.all_gather_object(values, value)
    return values


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the full model state on rank 0, empty elsewhere; every worker must call this."""
    return get_model_state_dict(model, options=_WHOLE)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the full optimizer state on rank 0, empty elsewhere; every worker must call this."""
    return dict(get_optimizer_state_dict(model, optimizer, options=_WHOLE))


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Restore the full state; each worker loads its part."""
    set_model_state_dict(model, weights, options=_WHOLE)
    # torch's setter requires state for every parameter; one without gradients has none
    stored, states = state["state"], {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        found = stored.get(name.replace(_CHECKPOINT_PREFIX, ""))
        if found is not None:
            states[index] = {key: _part(key, value, parameter) for key, value in found.items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _part(key: str, value: Any, parameter: Tensor) -> Any:
    """Return this worker's part of an optimizer state value; Adafactor's means stay whole."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    if key in ("row_var", "col_var"):  # for a matrix with one column or row
        return value
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
