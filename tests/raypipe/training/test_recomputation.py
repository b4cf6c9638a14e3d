"""What gradient checkpointing computes again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.training.model import recompute_blocks


class Counted(TorchDispatchMode):
    """Count operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.calls[operation.overloadpacket.__name__] += 1
        return operation(*arguments, **(named or {}))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(scaled_dot_product_attention(x, x, x))


def calls(block: nn.Module, shape: tuple[int, ...], what: Any) -> Counter[str]:
    """Return the operations of a step with recomputation."""
    recompute_blocks([block], what)
    with Counted() as counted:
        block(torch.randn(*shape, requires_grad=True)).sum().backward()
    return counted.calls


@pytest.mark.parametrize(
    ("build", "shape", "kept", "count"),
    [
        (lambda: nn.Sequential(nn.Conv1d(2, 2, 3), nn.SiLU(), nn.Conv1d(2, 2, 3)), (1, 2, 8),
         "convolution", 2),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SiLU()), (3, 2), "addmm", 1),
        (Attention, (1, 2, 4, 8), "_scaled_dot_product_flash_attention_for_cpu", 1),
    ],
)  # fmt: skip
def test_products_convolutions_and_attention_are_computed_once(
    build: Any, shape: tuple[int, ...], kept: str, count: int
) -> None:
    cheap, everything = (calls(build(), shape, what) for what in ("cheap", "all"))
    assert cheap[kept] == count < everything[kept]
    assert cheap["silu"] == everything["silu"]


def test_torch_refuses_an_activation_in_place_after_a_kept_product() -> None:
    with pytest.raises(RuntimeError, match="selective activation checkpoint has been mutated"):
        calls(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), (3, 2), "cheap")
