"""Optimizers: their groups, Adafactor and Muon, and a task's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.training import optimizer as module
from raypipe.training.optimizer import Adafactor, Muon, Update, build
from raypipe.training.settings import TrainingSettings


class Small(nn.Module):
    """An embedding, a block with a matrix, a kernel and an embedding of its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        parts = nn.Linear(4, 3), nn.Conv1d(3, 2, 2), nn.Embedding(2, 3)
        self.block = nn.ModuleDict(zip(("linear", "kernel", "positions"), parts, strict=True))
        self.head = nn.Linear(3, 5)


def made(**training: Any) -> tuple[Small, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Small()
    return model, build(model, [model.block], TrainingSettings(**training))


def test_muon_updates_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    model, both = made(optimizer="muon", learning_rate=0.02, weight_decay=0.1, betas=(0.8, 0.9))
    expected = made()[0]
    matrix = expected.block["linear"].weight
    others = [p for p in expected.parameters() if p is not matrix]
    options = {"lr": 0.02, "weight_decay": 0.1}
    muon = Muon([matrix], adjust_lr_fn="match_rms_adamw", **options)
    adamw = torch.optim.AdamW(others, betas=(0.8, 0.9), fused=True, **options)
    for seed in (1, 2, 3):
        generator = torch.Generator().manual_seed(seed)
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for each in (both, muon, adamw):
            each.step()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


SHAPES = [(5, 3), (7,), (), (1, 4), (4, 1), (3, 2, 4), (2, 3, 2, 2)]


def adafactor_weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    scales = [1.0, 1e-6, 0.3, 2.0, 1.0, 1.0, 30.0]  # below and above the least size of a step
    return [nn.Parameter((w * s).to(dtype)) for w, s in zip(drawn, scales, strict=True)]


def give_scaled_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        missing = number == 1 and step == 1
        parameter.grad = None if missing else (drawn * 10.0 ** (step - 2)).to(parameter.dtype)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "lr": 0.7}, {"d": 2.0}])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_adafactor_takes_the_steps_of_torchs(
    dtype: torch.dtype, tolerance: float, options: dict[str, Any]
) -> None:
    """Also with gradients that are missing in a step, zero or huge."""
    own, torchs = adafactor_weights(dtype), adafactor_weights(dtype)
    optimizers = Adafactor(own, **options), torch.optim.Adafactor(torchs, **options)
    for step in range(6):
        for parameters, optimizer in zip((own, torchs), optimizers, strict=True):
            give_scaled_gradients(parameters, step)
            if step == 3:
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        for found, expected in zip(own, torchs, strict=True):
            assert (found - expected).norm() <= tolerance * expected.norm()
    found, expected = (optimizer.state_dict()["state"] for optimizer in optimizers)
    torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=0)


def test_small_updates_of_half_precision_weights_add_up() -> None:
    """Each is far below the spacing of bf16 at 1, which is 2^-8."""
    drawn = torch.rand(64, 500, generator=torch.Generator().manual_seed(2)).bfloat16()
    half, whole = nn.Parameter(drawn.clone()), nn.Parameter(drawn.float())
    optimizers = [Adafactor([w], lr=1e-4, weight_decay=0.1) for w in (half, whole)]
    before = torch.get_rng_state()
    for _ in range(100):
        for weight, optimizer in zip((half, whole), optimizers, strict=True):
            weight.grad = torch.full_like(weight, 1e-6)  # as of a sum that is a mean later
            optimizer.step()
    moved = (whole - drawn.float()).mean()
    assert moved < -1e-3
    torch.testing.assert_close((half.float() - drawn.float()).mean(), moved, rtol=0.03, atol=0)
    assert optimizers[0].state[half]["row_var"].dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), before)  # a model's draws stay the same


@pytest.mark.parametrize("size", [(4, 3), (16, 64), (64, 16), (1, 5)])
def test_directions_on_a_cpu_are_those_in_full_precision(size: tuple[int, int]) -> None:
    """Against Newton-Schulz on the singular values, in fp64; bf16 is off by some thousandths."""
    torch.manual_seed(1)
    matrix, gradient = nn.Parameter(torch.zeros(size)), torch.randn(size)
    matrix.grad = gradient.clone()
    optimizer = Muon([matrix], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    optimizer.step()
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    values /= values.norm()
    a, b, c = optimizer.defaults["ns_coefficients"]
    for _ in range(optimizer.defaults["ns_steps"]):
        values = a * values + b * values**3 + c * values**5
    expected = -0.2 * math.sqrt(max(size)) * (left * values) @ right
    torch.testing.assert_close(matrix.double(), expected, rtol=0, atol=2e-5)


def test_in_half_precision_plain_matrices_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, whose products are in bf16."""
    real, card = module.product_type, torch.device("cuda")
    monkeypatch.setattr(module, "product_type", lambda device: real(card))
    for size in ((4, 3), (3, 4)):
        found, expected = ([nn.Parameter(torch.ones(size))] for _ in range(2))
        for parameters, kind in ((found, Muon), (expected, torch.optim.Muon)):
            parameters[0].grad = torch.arange(12.0).view(size)
            kind(parameters, lr=0.02, adjust_lr_fn="match_rms_adamw").step()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("weight", "exponent"), [(0.0, 14), (3.0, 13), (0.1, 18), (math.inf, 14)])
def test_the_first_scale_of_fp16_follows_from_a_weight_that_counts(weight, exponent) -> None:
    model, training = nn.Linear(1, 1), TrainingSettings(precision="fp16", steps=1)
    update = Update(model, torch.optim.SGD(model.parameters()), training, torch.device("cpu"))
    update.choose_scale(weight)
    assert update.scaler_state()["scale"] == 2.0**exponent
