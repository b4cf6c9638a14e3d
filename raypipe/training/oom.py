"""Out-of-memory detection, and peak memory."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from raypipe.errors import BatchLimit, FailureKind, UnitError

# what CUDA's libraries say when it is not torch.OutOfMemoryError
_GPU_SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "out of memory'",  # NCCL: Cuda failure 2 'out of memory'
    "Triton Error [CUDA]: out of memory",
)
_HOST_SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough",
    # of a loader process: by the kernel, and where /dev/shm is full
    "is killed by signal: Killed",
    "is killed by signal: Bus error",
)


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


class DoesNotFit(torch.OutOfMemoryError):
    """A forward, or its backward, ran out of GPU memory; ``limit`` says with how many samples."""

    def __init__(self, limit: BatchLimit, message: str) -> None:
        super().__init__(message)
        self.limit = limit


@contextmanager
def fitting(limit: BatchLimit) -> Iterator[None]:
    """Raises DoesNotFit where the work inside runs out of GPU memory."""
    try:
        yield
    except Exception as error:
        if failure_kind(error) != "out_of_memory":
            raise
        raise DoesNotFit(limit, str(error)) from error


def unit_error(unit: str, error: Exception) -> UnitError:
    """The failure of a unit as it travels between processes.

    The kind travels beside the text: the exception's own type may not unpickle elsewhere.
    """
    limit = error.limit if isinstance(error, DoesNotFit) else None
    return UnitError(unit, failure_kind(error), str(error), limit)


def gpu_peak_bytes(device: torch.device) -> int | None:
    """The most memory this process held on its GPU; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def forget_peaks(device: torch.device) -> None:
    """Begin to measure peaks anew: a process may have trained something else before."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)
    gc.collect()
    with suppress(OSError, AttributeError):  # Linux alone can; elsewhere the peak is the process's
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def host_peak_bytes() -> int:
    """The most resident memory this process had since ``forget_peaks``."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
