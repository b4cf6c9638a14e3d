"""CUDA's choices for a step that runs under fake CPU tensors.

Fake tensors need no card, but a build of torch without CUDA cannot give them the device ``cuda``.
So a step runs with the device ``cpu``, and this mode replaces what torch decides by the device:
which functions autocast runs in single precision, the attention kernel, and fused kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

#: functions that autocast runs in single precision on CUDA (torch's ``autocast_mode.h``), by the
#: names that Python code calls
SINGLE_PRECISION = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__", "softplus",
    "layer_norm", "rms_norm", "group_norm", "norm", "vector_norm", "matrix_norm",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "interpolate", "prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum",
}  # fmt: skip
_HALF = (torch.bfloat16, torch.float16)
#: the widest head of flash attention
_FLASH_WIDTH = 256


class CudaRules(TorchFunctionMode):
    """Mode in which functions on CPU tensors take the kernels that they have on a card.

    Args:
        compute_capability: of the card, such as ``8.6``; flash attention needs 8.

    """

    def __init__(self, compute_capability: float) -> None:
        super().__init__()
        self._flash = compute_capability >= 8

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function as CUDA would."""
        del types
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if torch.is_autocast_enabled("cpu") and name in SINGLE_PRECISION:
            args = tuple(_single(each) for each in args)
            given = {key: _single(value) for key, value in given.items()}
            with torch.autocast("cpu", enabled=False):
                return self._call(name, func, args, given)
        return self._call(name, func, args, given)

    def _call(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]
    ) -> Any:
        if name == "backward" and isinstance(args[0], Tensor):
            with self:  # gradient checkpointing runs functions again
                ones = (torch.ones_like(args[0]),)
                return _engine_run_backward(
                    (args[0],), ones, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if name == "multi_head_attention_forward":  # the mode does not see what it calls
            with patch.object(F, "scaled_dot_product_attention", self._attention):
                return func(*args, **given)
        if name == "scaled_dot_product_attention":
            return self._attention(*args, **given)
        if name == "rms_norm":
            return _rms_norm(*args, **given)
        if name == "dropout":
            return _dropout(func, *args, **given)
        return func(*args, **given)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attention by the kernel that CUDA chooses: flash, else memory-efficient."""
        if torch.is_autocast_enabled("cpu"):
            kind = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(kind), key.to(kind), value.to(kind)
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(times, -3) for each in (key, value))
        flash = self._flash and query.dtype in _HALF and query.shape[-1] <= _FLASH_WIDTH
        if attn_mask is None and flash:
            done = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )
            return done[0]  # type: ignore[no-any-return]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = zeros.masked_fill_(~attn_mask, -math.inf)
            size = (*query.shape[:-1], key.shape[-2])
            attn_mask = attn_mask.to(query.dtype).expand(size)
        done = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )
        return done[0]  # type: ignore[no-any-return]


def _single(value: Any) -> Any:
    """Return a tensor of half precision in single precision; other values as they are."""
    if isinstance(value, Tensor) and value.dtype in _HALF:
        return value.float()
    return value


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return the norm by one kernel; on a CPU, and under fake tensors, it is several.

    Layer norm stands in for it: also one kernel per pass, but it stores the mean of each row, too.
    """
    del eps
    done: Tensor = aten.native_layer_norm(input, normalized_shape, weight, None, 0.0)[0]
    return done


def _dropout(
    func: Callable[..., Any],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Return the dropout by one kernel with a mask of one byte per value."""
    if func not in (F.dropout, torch.dropout) or not (training and p):
        return input
    done: Tensor = aten.native_dropout(input, p, True)[0]
    return input.copy_(done) if inplace else done
