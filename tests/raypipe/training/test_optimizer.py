"""Optimizers: their groups, Muon beside AdamW, and a task's own."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.hardware import Hardware
from raypipe.training.optimizer import Muon, build
from raypipe.training.settings import TrainingSettings, TrainStageSettings, obstacles

CPU = torch.device("cpu")


class Small(nn.Module):
    """An embedding, a block with a matrix, a norm and an embedding of its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.block = nn.ModuleDict(
            {"linear": nn.Linear(4, 3), "norm": nn.LayerNorm(3), "positions": nn.Embedding(2, 3)}
        )
        self.head = nn.Linear(3, 5)


def made(**training: Any) -> tuple[Small, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Small()
    return model, build(model, [model.block], TrainingSettings(**training))


def give_gradients(model: nn.Module, seed: int | None) -> None:
    generator = torch.Generator().manual_seed(seed or 0)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.zeros_like(parameter) if seed is None else drawn


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "adafactor", "muon"])
def test_norms_and_biases_need_not_decay(optimizer: str) -> None:
    """With a gradient of zero only the decay changes a weight."""
    for on, vectors in (("all", True), ("matrices", False)):
        model, updates = made(optimizer=optimizer, weight_decay=0.1, weight_decay_on=on)
        before = deepcopy(model.state_dict())
        before["block.norm.bias"] += 1
        model.load_state_dict(before)
        give_gradients(model, None)
        updates.step()
        after = model.state_dict()
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert {name for name in after if after[name].ndim == 2} <= changed
        assert ("block.norm.weight" in changed) == ("block.norm.bias" in changed) == vectors


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"optimizer": "adafactor", "precision": "bf16"}, True),
        ({"optimizer": "adafactor"}, False),
        ({"precision": "bf16"}, False),
    ],
)
def test_only_adafactor_updates_half_precision_weights(
    given: dict[str, Any], allowed: bool
) -> None:
    """Refused before anything starts; a sweep skips such points and says why."""
    settings = TrainStageSettings(training=TrainingSettings(weights="bf16", **given))
    found = obstacles("train", settings, [Hardware("node", 4, 2**34, ())])
    assert [each.key for each in found] == [] if allowed else ["train.training.weights"]


def test_the_length_of_a_decay_is_part_of_the_identity_where_it_has_an_effect() -> None:
    assert "decay_steps" not in TrainingSettings().identity()
    assert "decay_steps" in TrainingSettings(schedule="warmup-stable-decay").identity()


def test_muon_updates_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    given = {"learning_rate": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    model, both = made(optimizer="muon", **given)
    expected = made()[0]
    matrix = expected.block["linear"].weight
    others = [p for p in expected.parameters() if p is not matrix]
    options = {"lr": 0.02, "weight_decay": 0.1}
    muon = Muon([matrix], adjust_lr_fn="match_rms_adamw", **options)
    adamw = torch.optim.AdamW(others, betas=(0.8, 0.9), fused=True, **options)
    for seed in (1, 2, 3):
        give_gradients(model, seed)
        give_gradients(expected, seed)
        for each in (both, muon, adamw):
            each.step()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_muon_needs_blocks() -> None:
    model = Small()
    with pytest.raises(ValueError, match="names no blocks with matrices"):
        build(model, [], TrainingSettings(optimizer="muon"))
