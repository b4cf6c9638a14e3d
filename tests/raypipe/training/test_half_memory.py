from __future__ import annotations

import pytest
from torch import nn

from raypipe.training.half_memory import copied_weights


@pytest.mark.parametrize(
    ("recompute", "sharded", "expected"),
    [(False, False, 2 * 12 + 20), (True, False, 12 + 20), (False, True, 20), (True, True, 20)],
)
def test_only_weights_of_products_are_copied(recompute: bool, sharded: bool, expected: int) -> None:
    """Two blocks of 3 x 4 weights, an output matrix of 4 x 5 and an embedding of its own."""
    blocks = [nn.Linear(3, 4, bias=False) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(7, 3), *blocks, nn.Linear(4, 5, bias=False))
    found = copied_weights(model, blocks, recompute=recompute, sharded=sharded)
    assert found == expected
