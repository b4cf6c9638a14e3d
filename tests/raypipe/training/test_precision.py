"""The layers that multiply in fp8, and where it is refused."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from raypipe import hardware
from raypipe.hardware import Gpu, Hardware
from raypipe.training import precision
from raypipe.training.settings import TrainStageSettings, obstacles


def model() -> nn.Sequential:
    """Embedding, two blocks with linear layers of several sizes, and an output matrix."""
    block = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 20), nn.Linear(20, 32))
    attention = nn.MultiheadAttention(32, 2)  # it uses the weights of its layer, not the layer
    return nn.Sequential(nn.Embedding(64, 32), block, attention, nn.Linear(32, 64))


def test_layers_of_blocks_are_chosen_and_freed_once_they_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those whose sides tensor cores take. FSDP would move layers that live on to the device."""
    network, chosen, kept = model(), [], []
    block = network[1]
    assert isinstance(block, nn.Sequential)
    replaced = weakref.ref(block[0])

    def convert(whole: nn.Module, *, module_filter_fn: Any, config: Any) -> None:
        assert config.pad_inner_dim
        chosen.extend(n for n, layer in whole.named_modules() if module_filter_fn(layer, n))
        kept.append((module_filter_fn, config))  # as torchao does, in a cycle of references
        block[0] = nn.Identity()

    made = SimpleNamespace(Float8LinearConfig=SimpleNamespace, convert_to_float8_training=convert)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=made))
    monkeypatch.setitem(sys.modules, "torchao.float8", made)
    precision.to_float8(network, network[1:3])
    assert chosen == ["1.0"]
    assert replaced() is None


def test_blocks_without_such_layers_are_refused() -> None:
    network = model()
    for blocks in ((), network[2:3], network[0:1]):
        with pytest.raises(ValueError, match=r"fp8: the task's blocks .* use bf16"):
            precision.to_float8(network, blocks)


@pytest.mark.parametrize(
    ("capability", "installed", "reason"),
    [
        (None, True, "this CPU lacks fp8"),
        ("8.6", True, "this GPU lacks fp8"),
        ("9.0", False, "torchao is not installed (pip install 'raypipe-runner[fp8]')"),
        ("8.9", True, None),
    ],
)
def test_fp8_is_refused_without_the_card_or_the_package(
    monkeypatch: pytest.MonkeyPatch, capability: str | None, installed: bool, reason: str | None
) -> None:
    monkeypatch.setattr(hardware, "find_spec", lambda name: object() if installed else None)
    gpus = (Gpu(0, "GPU-0", "card", 2**34, capability),) if capability else ()
    settings = TrainStageSettings.model_validate({"training": {"precision": "fp8"}})
    found = obstacles("train", settings, [Hardware("node", 4, 2**34, gpus)])
    assert [each.reason for each in found] == ([reason] if reason else [])
    assert all(each.key == "train.training.precision" for each in found)
