from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.summarization.model import (
    T5Settings,
    build_model,
    flops_per_sample,
    mt5_1_2b,
    next_token_logits,
    small,
    t5_220m,
)
from tests.experiments.summarization.references import BOTH, batch


def _parameters(settings: T5Settings) -> int:
    with torch.device("meta"):
        model = build_model(settings)
    return sum(parameter.numel() for parameter in model.parameters())


@BOTH
def test_flops_are_those_that_pytorch_counts(settings: T5Settings) -> None:
    """With the attention as plain products; fused kernels count what they compute twice."""
    model, (inputs, mask, targets) = build_model(settings), batch(settings)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_logits(model, inputs, mask, targets).sum().backward()
    assert counter.get_total_flops() == 3 * flops_per_sample(settings, 14, 16)


def test_the_sizes_are_those_of_the_workload() -> None:
    assert _parameters(t5_220m()) == 222_903_552  # what t5-base has in transformers
    assert _parameters(mt5_1_2b()) == 1_229_581_312  # as google/mt5-large
    assert _parameters(small()) < 2e6
