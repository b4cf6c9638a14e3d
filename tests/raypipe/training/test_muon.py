"""Muon on sharded matrices: the steps of one worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from raypipe.training import optimizer as module
from raypipe.training import parallel
from raypipe.training.optimizer import Muon, build
from raypipe.training.settings import TrainingSettings

#: rows that are even, odd and fewer than two workers
SIZES = [(6, 9), (9, 6), (6, 1), (1, 6)]


def model() -> nn.Sequential:
    torch.manual_seed(2)
    blocks = [nn.Linear(*size) for size in SIZES]
    return nn.Sequential(nn.Embedding(5, 6), *blocks, nn.LayerNorm(6))


def optimizer(network: nn.Sequential) -> torch.optim.Optimizer:
    training = TrainingSettings(optimizer="muon", learning_rate=0.02, weight_decay=0.1)
    return build(network, network[1:-1], training)


def trained(network: nn.Sequential, mesh: DeviceMesh | None = None) -> list[Any]:
    """The weights, and the momentum of the first matrix, after three steps."""
    updates = optimizer(network)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for each in network.parameters():
            gradient = torch.randn(each.shape, generator=generator)
            if mesh is not None:
                gradient = distribute_tensor(gradient, mesh, each.placements)  # type: ignore[attr-defined]
            each.grad = gradient
        updates.step()
    weights = {name: parallel.whole(value) for name, value in network.state_dict().items()}
    return [weights, parallel.whole(updates.state[network[1].weight]["momentum_buffer"])]


def sharded(rank: int, file: Path) -> None:
    mesh, network = init_device_mesh("cpu", (2,)), model()
    for block in network[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    found = trained(network, mesh)
    if rank == 0:
        torch.save(found, file)


def test_sharded_matrices_take_the_steps_of_whole_ones(
    group: Callable[..., object], tmp_path: Path
) -> None:
    """Not to rounding, but exactly: each worker orthogonalizes the whole matrix."""
    group(sharded, tmp_path / "found")
    found = torch.load(tmp_path / "found")
    torch.testing.assert_close(found, trained(model()), rtol=0, atol=0)


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
    monkeypatch.setattr(module, "product_type", lambda device: torch.bfloat16)
    given: dict[str, Any] = {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}
    for size in ((4, 3), (3, 4)):
        found, expected = ([nn.Parameter(torch.ones(size))] for _ in range(2))
        for parameters, kind in ((found, Muon), (expected, torch.optim.Muon)):
            parameters[0].grad = torch.arange(12.0).view(size)
            kind(parameters, **given).step()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
