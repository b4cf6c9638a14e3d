from __future__ import annotations

import numpy as np
import pytest

from experiments.transformer.comparison import mcnemar


def test_mcnemar_counts_the_rows_that_only_one_has_right() -> None:
    first, second = np.ones(30, bool), np.ones(30, bool)
    assert mcnemar(first, second) == (0, 0, 1.0)
    first[:2], second[4:12] = False, False
    # the tail of ten throws of a coin: (1 + 10 + 45) / 2^10, on both sides
    assert mcnemar(first, second) == (8, 2, pytest.approx(2 * 56 / 1024))
