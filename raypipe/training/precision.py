"""Numerical precision: support and settings of fp32, tf32, bf16 and fp16 on a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from raypipe.hardware import Precision as Precision
from raypipe.hardware import supported_precisions

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def check(precision: Precision, device: torch.device, key: str = "training.precision") -> None:
    """Reject a precision that the device does not support; ``key`` is its configuration key.

    Raises:
        ValueError: the device does not support it; the message lists those that it supports.

    """
    capability = None
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    allowed = supported_precisions(capability)
    if precision not in allowed:
        raise ValueError(
            f"{key} = {precision}: this {device.type} device lacks it (it has {', '.join(allowed)})"
        )


def configure(precision: Precision) -> None:
    """Set the matrix arithmetic of the process; TF32 is enabled only for ``tf32``."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(
    precision: Precision, device: torch.device, *, recompute: bool = False
) -> AbstractContextManager[object]:
    """Return the autocast context of the forward pass.

    By default autocast keeps a 16-bit copy of each weight until the context ends. With
    ``recompute`` (gradient checkpointing), a block's copies are freed with its activations.
    """
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in kinds:
        return nullcontext()
    return torch.autocast(device.type, dtype=kinds[precision], cache_enabled=not recompute)


def sharded(precision: Precision, device: torch.device) -> MixedPrecisionPolicy:
    """Return FSDP's arithmetic of a block: with bf16 on a GPU, weights are gathered in bf16.

    Autocast would cast the weights of its matrices after they were gathered in fp32, twice the
    bytes. Inputs keep their type, as the sum of the residual stream does, and gradients are reduced
    in fp32. fp16 stays with autocast: gradients of norms, sums over all tokens, would overflow. So
    does the CPU, whose layer norm takes no parameters of another type than its input.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # slow, and only trainings need it

    if precision != "bf16" or device.type != "cuda":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def store(model: nn.Module, weights: Literal["fp32", "bf16"]) -> None:
    """Convert the parameters of a model to bf16 if that is wanted; buffers stay as they are."""
    if weights == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
