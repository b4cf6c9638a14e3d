"""What gradient checkpointing computes again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.lm_pretrain.model import DecoderLayer, LanguageModel, LmSettings
from raypipe.training.model import recompute_blocks

SETTINGS = LmSettings(
    vocabulary=20, width=32, heads=2, layers=2, feed_forward=48, context=16, dropout=0.1
)


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


def step(
    what: Literal["all", "cheap"] | None, cast: Callable[[], Any]
) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Return the gradients of a language model, and the operations of the step."""
    torch.manual_seed(0)
    model = LanguageModel(SETTINGS)
    tokens = torch.randint(20, (3, 16))
    layers = [layer for layer in model.modules() if isinstance(layer, DecoderLayer)]
    for layer in layers:
        layer.attention.dropout = 0.0  # on a CPU, attention with dropout is not fused
    if what is not None:
        recompute_blocks(layers, what)
    with Counted() as counted:
        with cast():
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return gradients, counted.calls


def small_step(block: nn.Sequential, *shape: int) -> Counter[str]:
    recompute_blocks([block], "cheap")
    with Counted() as counted:
        block(torch.randn(*shape, requires_grad=True)).sum().backward()
    return counted.calls


def test_convolutions_are_computed_once() -> None:
    calls = small_step(nn.Sequential(nn.Conv1d(2, 2, 3), nn.SiLU(), nn.Conv1d(2, 2, 3)), 1, 2, 8)
    assert (calls["convolution"], calls["silu"]) == (2, 2)


def test_torch_refuses_an_activation_in_place_after_a_kept_product() -> None:
    with pytest.raises(RuntimeError, match="selective activation checkpoint has been mutated"):
        small_step(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), 3, 2)
    assert small_step(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 3, 2)["relu"] == 2


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_products_and_attention_are_computed_once_and_the_gradient_is_the_same(
    kind: torch.dtype,
) -> None:
    def cast() -> Any:
        enabled = kind != torch.float32
        return torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False)

    (plain, once), (whole, twice), (cheap, again) = (
        step(what, cast) for what in (None, "all", "cheap")
    )
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    layers = SETTINGS.layers
    assert twice["mm"] == once["mm"] + 4 * layers
    assert again["mm"] == once["mm"]
    assert (once[attention], twice[attention], again[attention]) == (layers, 2 * layers, layers)
    assert twice["silu"] == again["silu"] == 2 * once["silu"] == 2 * layers
    assert plain.keys() == whole.keys() == cheap.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, whole[name]), name
        assert torch.equal(gradient, cheap[name]), name
