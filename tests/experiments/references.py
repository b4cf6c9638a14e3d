"""What tests of several models compare with: PyTorch's encoder, its counts, lively weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext

#: the first step of a training
STEP = StepContext(0, Phase("train", 1, 8, 1e-3), 0)


def counted_flops(call: Callable[[], object]) -> int:
    """What PyTorch counts, with plain products: fused attention counts what it computes twice."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def parameter_count(build: Callable[[Any], nn.Module], settings: Any) -> int:
    with torch.device("meta"):
        model = build(settings)
    return sum(parameter.numel() for parameter in model.parameters())


def lively(model: Any, alpha: float = 0.5) -> Any:
    """The model with weights so large that every part shows in its output."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=alpha)
    return model


def torch_encoder(
    layers: nn.ModuleList, inputs: Callable[[Any], tuple[Tensor, Tensor]], *sizes: int, **how: Any
) -> nn.TransformerEncoder:
    """PyTorch's encoder with the weights of ours; ``inputs``: of queries, keys and values."""
    layer = nn.TransformerEncoderLayer(*sizes, dropout=0.0, batch_first=True, **how)
    encoder = nn.TransformerEncoder(layer, len(layers), enable_nested_tensor=False).double()
    for ours, theirs in zip(layers, encoder.layers, strict=True):
        weight, bias = inputs(ours)
        state = {"self_attn.in_proj_weight": weight, "self_attn.in_proj_bias": bias}
        for name, part in {
            "self_attn.out_proj": ours.out,
            **{"linear1": ours.up, "linear2": ours.down},
            **{"norm1": ours.norm_attention, "norm2": ours.norm_feed_forward},
        }.items():
            state |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
        theirs.load_state_dict(state)
    return encoder
