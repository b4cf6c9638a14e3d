from __future__ import annotations

import numpy as np
import pytest

from experiments.transformer.comparison import mcnemar


def test_mcnemar_counts_the_rows_that_only_one_has_right() -> None:
    first, second = np.ones(30, bool), np.ones(30, bool)
    assert mcnemar(first, second) == {"only_first": 0, "only_second": 0, "p_value": 1.0}
    first[:2], second[4:12] = False, False
    # the tail of ten throws of a coin: (1 + 10 + 45) / 2^10, on both sides
    expected = {"only_first": 8, "only_second": 2, "p_value": pytest.approx(2 * 56 / 1024)}
    assert mcnemar(first, second) == expected
