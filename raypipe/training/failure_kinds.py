"""Kinds of failures, out-of-memory errors above all."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from raypipe.errors import BatchLimit, FailureKind, UnitError, message_of, trace_of

# messages of CUDA's libraries that are not raised as torch.OutOfMemoryError
_GPU_SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",  # expandable segments
    "_ALLOC_FAILED",  # cuBLAS, cuSOLVER, cuFFT, and cuDNN before 9
    "DEVICE_ALLOCATION_FAILED",  # cuDNN 9
    "out of memory'",  # NCCL: Cuda failure 2 'out of memory'
    "Failed to CUDA malloc",  # NCCL, as the next one
    "Failed to CUDA calloc",
    "Triton Error [CUDA]: out of memory",
    # of frameworks other than torch
    *("RESOURCE_EXHAUSTED: Out of memory", "ResourceExhaustedError", "HIP out of memory"),
)
# messages of libraries that could not start, or found no workspace: another cause unless the card
# is full
_FULL_CARD_SIGNS = ("_STATUS_NOT_INITIALIZED", "unable to find an engine", "valid cuDNN algorithm")
# torch before 2.10 reads the second name
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_HOST_SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough",
    "HOST_ALLOCATION_FAILED",  # cuDNN 9
    "Failed to CUDA host alloc",  # NCCL
)
# CUDA also says this of page-locked memory, which is the host's; then the text or the frames of
# the error have one of the words
_AMBIGUOUS = "CUDA error: out of memory"
_PINNED = ("pin memory thread", "pin_memory", "cudaHostAlloc", "cudaHostRegister")
_HUNG_SIGNS = (
    "Watchdog caught collective operation timeout",  # NCCL
    "ms for recv operation to complete",  # gloo, as the next one
    "ms for send operation to complete",
)
_HUNG = (
    "a worker waited for the others longer than the time limit of an exchange: one of them hangs, "
    "or is much slower (each worker has a log in logs/)"
)
#: message for a loader process that ended without an answer
LOADER_DIED = (
    "a loader process died; the kernel kills them when the memory of the host or /dev/shm is full "
    "(lower loader.workers or loader.prefetch)"
)
_COMPILERS = ("torch._dynamo.", "torch._inductor.", "triton.compiler.")
#: bytes; a card with less free memory has no room for the kernels or the workspace of a library
_ROOM = 512 * 2**20


def failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of a failure.

    ``out_of_memory`` is for the GPU's memory and ``host_out_of_memory`` for the host's, including
    its page-locked memory. ``worker_hung`` is an exchange that exceeded its time limit, and
    ``worker_died`` a loader process that ended. A non-finite loss is an ``invalid_value``, and what
    torch.compile cannot compile a ``compile_error``. Everything else is an ``error``.
    """
    text = message_of(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out_of_memory"
    if isinstance(error, MemoryError) or _has(text, _HOST_SIGNS):
        return "host_out_of_memory"
    if _has(text, _GPU_SIGNS):
        on_host = _AMBIGUOUS in text and (_is_pinning(error, text) or _is_card_full() is False)
        return "host_out_of_memory" if on_host else "out_of_memory"
    if _has(text, _FULL_CARD_SIGNS) and _is_card_full():
        return "out_of_memory"
    if _has(text, _HUNG_SIGNS):
        return "worker_hung"
    if LOADER_DIED in text:
        return "worker_died"
    if isinstance(error, FloatingPointError):
        return "invalid_value"
    kinds = [f"{kind.__module__}." for kind in type(error).__mro__]
    is_compiler = any(kind.startswith(_COMPILERS) for kind in kinds)
    return "compile_error" if is_compiler else "error"


def _has(text: str, signs: Iterable[str]) -> bool:
    return any(sign in text for sign in signs)


def _is_pinning(error: BaseException, text: str) -> bool:
    """Whether an error was raised by the allocation of page-locked memory."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    return _has("\n".join([text, *(f"{each.name} {each.line}" for each in frames)]), _PINNED)


def _is_card_full() -> bool | None:
    """Whether this process's GPU is nearly full; None if that is not known."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # the card does not answer any more
            return torch.cuda.mem_get_info()[0] < _ROOM
    return None


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
    if kind == "worker_hung":
        message = f"{_HUNG}: {message}"
    if kind == "compile_error":  # the cause; pages of code follow, which are in the trace
        message = " ".join(message_of(error).splitlines()[:2])
    return UnitError(unit, kind, message, limit, trace_of(error))


def expandable_segments() -> dict[str, str]:
    """Return the variables with which torch grows its segments of GPU memory.

    Less is then lost between tensors. A process must have them before CUDA starts in it. There are
    none if the user has configured the allocator.
    """
    if any(name in os.environ for name in _ALLOCATOR):
        return {}
    return dict.fromkeys(_ALLOCATOR, "expandable_segments:True")
