"""What studies of T alone ask for stays the same for ever, for what is stored replays on it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from experiments.pabbo_lda.optimizers import OptimizerName, Point, Space, make_optimizer
from experiments.pabbo_lda.optimizers.space import FloatArray, IntArray
from experiments.pabbo_lda.settings import START

#: digests of the batches that were asked for when T was all that could be searched
RECORDED: dict[OptimizerName, str] = {
    "ga": "9dc2a0b37f5cef7b",
    "es": "1a8257ca42800d3c",
    "pabbo_small": "c53d56e368934c2c",
    "pabbo_large": "c53d56e368934c2c",
    "sabbo": "26c654fe5cb826ae",
    "random": "31096c7c2ceb0158",
    "tpe": "5a7bd7b969d20f1e",
    "golden_section": "4d02d9bbfe97fd64",
}


def nearness(
    duels: FloatArray, preferred: FloatArray, points: FloatArray, pairs: IntArray, used: float
) -> FloatArray:
    """Stands in for a trained model: likes what is near the points preferred in its duels."""
    winners = np.where(preferred == 1, duels[:, 1], duels[:, 0])
    return -np.abs(points[pairs][:, :, None] - winners).sum(axis=(1, 2)) * (1 + used)


def bowl(T: int) -> float:
    return math.log(T / 31) ** 2 + 1


def rough(T: int) -> float:
    """The bowl with steps, and without a value here and there."""
    return math.nan if T % 13 == 0 or T % 29 == 0 else round(bowl(T), 1)


def batches(
    name: OptimizerName, space: Space, seed: int, value: Callable[[int], float]
) -> list[list[int]]:
    """The T of the first twelve batches."""
    scorer = nearness if name.startswith("pabbo") else None
    optimizer = make_optimizer(name, space=space, seed=seed, scorer=scorer)
    batch = [Point(T) for T in START if space.t_min <= T <= space.t_max]
    asked = []
    for _ in range(12):
        optimizer.tell(batch, [value(point.T) for point in batch])
        batch = optimizer.ask()
        if not batch:
            break
        asked.append([point.T for point in batch])
    return asked


@pytest.mark.parametrize("name", RECORDED)
def test_the_search_of_t_alone_stays_what_it_was(name: OptimizerName):
    spaces = (Space(2, 1000), Space(2, 30), Space(7, 300))
    asked = [
        batches(name, space, seed, value)
        for space in spaces
        for value in (bowl, rough)
        for seed in range(2)
    ]
    assert hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16] == RECORDED[name]
