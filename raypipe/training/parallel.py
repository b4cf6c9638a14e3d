"""Data parallelism: workers, what they hold of a model (DDP or FSDP2), exchanges of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from raypipe.training.batching import ceil_div
from raypipe.training.settings import TrainStageSettings


@dataclass(frozen=True)
class Worker:
    """Rank of a worker in its group, and the device it trains on."""

    rank: int
    device: torch.device
    workers: int = 1


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


def gradient_sync(
    module: ModelCall | DistributedDataParallel, wanted: bool
) -> AbstractContextManager[None]:
    """Return a context manager with or without the gradient exchange of DDP's backward passes.

    FSDP exchanges in every pass: otherwise each worker would keep the whole gradient until the
    last one.
    """
    if isinstance(module, DistributedDataParallel) and not wanted:
        return module.no_sync()
    return nullcontext()


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


class HostCopy:
    """Copy of a tensor on the host, which arrives while the device goes on.

    ``is_on_its_way``: reading the values may wait for the device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.is_on_its_way = tensor, tensor.is_cuda
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._tensor = tensor.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def values(self) -> Tensor:
        """Return the tensor on the host; this waits until it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor


def local(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this worker has; others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor) -> Any:
    """Return the index of the rows that this worker holds: FSDP cuts as torch.chunk."""
    if not isinstance(tensor, DTensor):
        return ...
    each = ceil_div(len(tensor), tensor.device_mesh.size())
    start = each * tensor.device_mesh.get_local_rank()
    return slice(start, start + each)


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
