"""Out-of-memory detection and peak memory."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from raypipe.errors import BatchLimit, FailureKind, UnitError, message_of, trace_of

# messages of CUDA's libraries that are not raised as torch.OutOfMemoryError
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
    # a loader process killed by the kernel, and a full /dev/shm
    "is killed by signal: Killed",
    "is killed by signal: Bus error",
)


def failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of a failure.

    ``out_of_memory`` is for the GPU's memory and ``host_out_of_memory`` for the host's. A
    non-finite loss is an ``invalid_value``. Everything else is an ``error``.
    """
    text = message_of(error)
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _GPU_SIGNS):
        return "out_of_memory"
    if isinstance(error, MemoryError) or any(sign in text for sign in _HOST_SIGNS):
        return "host_out_of_memory"
    if isinstance(error, FloatingPointError):
        return "invalid_value"
    return "error"


class DoesNotFit(torch.OutOfMemoryError):
    """Out of GPU memory in a forward or backward pass; ``limit`` holds the number of samples."""

    def __init__(self, limit: BatchLimit, message: str) -> None:
        super().__init__(message)
        self.limit = limit


@contextmanager
def fitting(limit: BatchLimit) -> Iterator[None]:
    """Raise DoesNotFit if the body runs out of GPU memory."""
    try:
        yield
    except Exception as error:
        if failure_kind(error) != "out_of_memory":
            raise
        raise DoesNotFit(limit, str(error)) from error


def unit_error(unit: str, error: BaseException) -> UnitError:
    """Return the failure of a unit in a form that can be sent between processes.

    The kind is sent along with the text, since the exception's type may not unpickle elsewhere.
    """
    if isinstance(error, UnitError):
        return error
    limit = error.limit if isinstance(error, DoesNotFit) else None
    kind = failure_kind(error)
    message = message_of(error) if kind == "error" else str(error)
    return UnitError(unit, kind, message, limit, trace_of(error))


def gpu_peak_bytes(device: torch.device) -> int | None:
    """Return the peak GPU memory that this process reserved; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def forget_peaks(device: torch.device) -> None:
    """Reset the peak-memory counters: the process may have run another training before."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)
    gc.collect()
    with suppress(OSError, AttributeError):  # Linux only; elsewhere the peak is the process's
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def host_peak_bytes() -> int:
    """Return the peak resident memory of this process since ``forget_peaks``."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
