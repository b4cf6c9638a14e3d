"""What a training asks of the nodes: automatic workers, MIG slices, fp8 and its layers."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

from raypipe import hardware
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.runner import _beside
from raypipe.hardware import Gpu, Hardware
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.training import precision
from raypipe.training.settings import (
    ScalingSettings,
    TrainStageSettings,
    automatic_workers,
    obstacles,
)


def node(gpus: int, cpus: int = 16) -> Hardware:
    cards = tuple(Gpu(n, f"GPU-{n}", "card", 2**34, "9.0") for n in range(gpus))
    return Hardware("node", cpus, 2**34, cards)


def settings(**scaling: Any) -> TrainStageSettings:
    return TrainStageSettings.model_validate({"scaling": scaling})


@pytest.mark.parametrize(
    ("nodes", "batch", "trainings", "scaling", "expected"),
    [
        ([node(4)], 64, 1, {}, 4),
        ([node(0)], 64, 1, {}, 1),
        ([node(4)], 64, 1, {"gpus_per_worker": 0}, 1),
        ([node(4)], 3, 1, {}, 3),
        ([node(8)], 64, 8, {}, 1),
        ([node(8)], 64, 3, {}, 2),
        ([node(8)], 64, 72, {}, 1),
        ([node(8), node(8)], 64, 1, {}, 16),
        ([node(8)], 64, 1, {"gpus_per_worker": 2}, 4),
        ([node(2)], 64, 1, {"gpus_per_worker": 0.5}, 4),
        ([node(8, cpus=4)], 64, 1, {}, 4),
        ([node(8, cpus=16)], 64, 1, {"cpus_per_worker": 8}, 2),
    ],
)
def test_it_is_what_fits_on_a_share_of_the_gpus(nodes, batch, trainings, scaling, expected):
    gpus = sum(len(each.gpus) for each in nodes)
    resolved = settings(**scaling).with_gpus(gpus)
    assert automatic_workers(resolved, batch, nodes, trainings) == expected


def test_a_training_on_mig_slices_has_one_worker() -> None:
    slices = tuple(Gpu(0, f"MIG-{n}", "card MIG 1g", 2**33, "9.0") for n in range(4))
    nodes = [Hardware("node", 16, 2**34, slices)]
    assert automatic_workers(settings().with_gpus(4), 64, nodes) == 1
    [found] = obstacles("train", settings(workers=2), nodes)
    assert (found.key, found.reason) == (
        "train.scaling.workers",
        "NCCL does not connect MIG slices",
    )
    assert obstacles("train", settings(workers=2, gpus_per_worker=0), nodes) == []
    assert obstacles("train", settings(), nodes) == []


def test_auto_is_the_default_and_other_texts_are_refused():
    assert ScalingSettings().workers == "auto"
    assert ScalingSettings().worker_count == 1
    with pytest.raises(ValidationError, match="auto"):
        ScalingSettings(workers="all")


def test_only_stages_that_can_run_at_the_same_time_share_the_resources(tmp_path: Path) -> None:
    def stage(name: str, *needs: str) -> Stage:
        return Stage(name, print, [Unit(name)], needs)

    stages = [stage("a"), stage("b"), stage("c", "a"), stage("d", "c"), stage("e", "b", "c")]
    ledger = Ledger(RunDirectory.at(tmp_path))

    def beside(place: int) -> str:
        return "".join(other.name for other in _beside(stages[place], stages, ledger))

    assert [beside(place) for place in range(5)] == ["b", "acd", "b", "be", "d"]


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
