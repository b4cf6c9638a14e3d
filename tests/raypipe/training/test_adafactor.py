"""Adafactor with rates on the device: torch's results, no values on the host, few exchanges."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.training.optimizer import Adafactor

SHAPES = [(5, 3), (7,), (), (1, 4), (4, 1), (3, 2, 4), (2, 3, 2, 2)]


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    scales = [1.0, 1e-6, 0.3, 2.0, 1.0, 1.0, 30.0]  # below and above the least size of a step
    return [nn.Parameter((w * s).to(dtype)) for w, s in zip(drawn, scales, strict=True)]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        missing = number == 1 and step == 1
        parameter.grad = None if missing else (drawn * 10.0 ** (step - 2)).to(parameter.dtype)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "lr": 0.7}, {"d": 2.0}])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_it_takes_the_steps_of_torchs(
    dtype: torch.dtype, tolerance: float, options: dict[str, Any]
) -> None:
    """Also with gradients that are missing in a step, zero or huge."""
    own, torchs = weights(dtype), weights(dtype)
    optimizers = Adafactor(own, **options), torch.optim.Adafactor(torchs, **options)
    for step in range(6):
        for parameters, optimizer in zip((own, torchs), optimizers, strict=True):
            give_gradients(parameters, step)
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
    for _ in range(100):
        for weight, optimizer in zip((half, whole), optimizers, strict=True):
            weight.grad = torch.full_like(weight, 1e-6)  # as of a sum that is a mean later
            optimizer.step()
    moved = (whole - drawn.float()).mean()
    assert moved < -1e-3
    torch.testing.assert_close((half.float() - drawn.float()).mean(), moved, rtol=0.03, atol=0)
    assert optimizers[0].state[half]["row_var"].dtype == torch.float32


def test_a_resumed_step_of_half_precision_weights_is_the_same() -> None:
    """Means are loaded exactly, and the rounding is that of the number of the step."""
    own, again = weights(torch.bfloat16), weights(torch.bfloat16)
    first, second = Adafactor(own), Adafactor(again)
    give_gradients(own, 0)
    first.step()
    for weight, other in zip(own, again, strict=True):
        other.data.copy_(weight)
    second.load_state_dict(deepcopy(first.state_dict()))
    for seed, (parameters, optimizer) in enumerate(((own, first), (again, second))):
        torch.manual_seed(seed)
        give_gradients(parameters, 1)
        optimizer.step()
    torch.testing.assert_close(own, again, rtol=0, atol=0)
    expected = first.state_dict()["state"]
    torch.testing.assert_close(second.state_dict()["state"], expected, rtol=0, atol=0)


class _Reads(TorchDispatchMode):
    """Counts the values that are read on the host, which wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "most"), [(Adafactor, len(SHAPES) + 1), (torch.optim.Adafactor, 3 * len(SHAPES))]
)
def test_only_the_number_of_the_step_is_read_on_the_host(kind: Any, most: int) -> None:
    """It is stored on the CPU; torch's also reads two norms per weight."""
    parameters = weights()
    optimizer = kind(parameters)
    give_gradients(parameters, 0)
    with _Reads() as reads:
        optimizer.step()
    assert reads.count == most
