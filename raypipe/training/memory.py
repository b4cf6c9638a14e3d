"""Recognising out of memory, and peak memory."""

from __future__ import annotations

import resource

import torch

from raypipe.errors import FailureKind

# what the allocators of CUDA, cuBLAS and cuDNN say when it is not torch.OutOfMemoryError
_GPU_SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_HOST_SIGNS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough")


def failure_kind(error: BaseException) -> FailureKind:
    """``out_of_memory`` for the GPU's, ``host_out_of_memory`` for the host's.

    A loss that is no number is an ``invalid_value``; all else is an ``error``.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _GPU_SIGNS):
        return "out_of_memory"
    if isinstance(error, MemoryError) or any(sign in text for sign in _HOST_SIGNS):
        return "host_out_of_memory"
    if isinstance(error, FloatingPointError):
        return "invalid_value"
    return "error"


def gpu_peak_bytes(device: torch.device) -> int | None:
    """The most memory this process held on its GPU; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def host_peak_bytes() -> int:
    """The most resident memory this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
