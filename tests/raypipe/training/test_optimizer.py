"""Optimizers: their groups, Muon beside AdamW, and a task's own."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import Regression, job
from safetensors.torch import load
from torch import Tensor, nn

from raypipe.hardware import Hardware
from raypipe.store import tables as results
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.optimizer import Muon, build
from raypipe.training.parallel import Worker
from raypipe.training.requirements import obstacles
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainingSettings, TrainStageSettings

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


def test_muon_goes_on_from_its_state() -> None:
    model, optimizer = made(optimizer="muon")
    give_gradients(model, 1)
    optimizer.step()
    again, other = made(optimizer="muon")
    again.load_state_dict(deepcopy(model.state_dict()))
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    for group in (*optimizer.param_groups, *other.param_groups):
        group["lr"] = 0.3
    for network, updates in ((model, optimizer), (again, other)):
        give_gradients(network, 2)
        updates.step()
    torch.testing.assert_close(model.state_dict(), again.state_dict(), rtol=0, atol=0)


def test_muon_needs_blocks() -> None:
    model = Small()
    with pytest.raises(ValueError, match="names no blocks with matrices"):
        build(model, [], TrainingSettings(optimizer="muon"))


class Single(Regression):
    """In single precision, which autocast converts."""

    def __init__(self, **given: Any) -> None:
        super().__init__(dtype=torch.float32, **given)


class Own(Regression):
    """Momentum with a rate of its own for the last layer, and a schedule of its own."""

    def optimizer(self, model: nn.Module, training: TrainingSettings) -> torch.optim.Optimizer:
        assert isinstance(model, nn.Sequential)
        rate, last = training.learning_rate, list(model[-1].parameters())
        first = list(model[:-1].parameters())
        groups = [{"params": last, "lr": 2 * rate}, {"params": first, "lr": rate}]
        return torch.optim.SGD(groups, momentum=0.9)

    def learning_rate(self, training: TrainingSettings, phase: Phase, step: int) -> float:
        return phase.learning_rate / (1 + step)


def _trained(asked: TrainingJob) -> tuple[dict[str, Tensor], list[float]]:
    train(asked, Worker(0, CPU))
    steps = results.read_table(asked.run_dir, "steps").sort_values("step")
    return load(asked.run_dir.read(asked.run_dir.model("fit"))), list(steps["lr"])


def test_a_task_may_have_an_optimizer_and_a_schedule_of_its_own(tmp_path: Path) -> None:
    task = Own(shuffle=False)
    found, rates = _trained(job(task, tmp_path, steps=3))
    assert rates == pytest.approx([0.01, 0.005, 0.01 / 3])
    torch.manual_seed(0)
    model = task.build_model()
    assert isinstance(model, nn.Sequential)
    optimizer = task.optimizer(model, TrainingSettings(learning_rate=0.01))
    data = task.build_dataset()
    for step, rate in enumerate(rates):
        rows = [data[i] for i in range(16 * step, 16 * step + 16)]
        loss = sum((model(row["x"]).squeeze() - row["y"]).square() for row in rows)  # type: ignore[union-attr]
        optimizer.zero_grad()
        (loss / 16).backward()
        for group, factor in zip(optimizer.param_groups, (2, 1), strict=True):
            group["lr"] = factor * rate
        optimizer.step()
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Own, {}),
        (Regression, {"weight_decay_on": "matrices", "weight_decay": 0.1}),
        (Single, {"optimizer": "adafactor", "weights": "bf16", "precision": "bf16"}),
        (Regression, {"optimizer": "muon", "weight_decay_on": "matrices", "weight_decay": 0.1}),
    ],
)
def test_groups_keep_their_states_in_a_checkpoint(
    tmp_path: Path, kind: type[Regression], given: dict[str, Any]
) -> None:
    """Groups have another order than the weights of the model."""
    whole, _ = _trained(job(kind(), tmp_path / "whole", **given))
    for fail_at in (5, None):
        asked = job(kind(fail_at=fail_at), tmp_path / "cut", checkpoint_every=2, **given)
        if fail_at is not None:
            with pytest.raises(ConnectionError):
                train(asked, Worker(0, CPU))
    torch.testing.assert_close(_trained(asked)[0], whole, rtol=0, atol=0)
