from __future__ import annotations

import pytest

from experiments.summarization.presets import PRESETS
from raypipe.training.presets import published


@pytest.mark.parametrize(
    ("gigabytes", "sizes"),
    [
        (None, {}),
        (8, {}),
        (9.75, {"mT5 1.2B": (1, 8), "T5 220M": (2, 1)}),  # a 10 GB card as it reports itself
        (15.8, {"mT5 1.2B": (1, 4), "T5 220M": (4, 2)}),
        (23.6, {"mT5 1.2B": (1, 4), "T5 220M": (4, 2)}),
        (39.4, {"mT5 1.2B": (4, 2), "T5 220M": (8, 2)}),
        (139, {"mT5 1.2B": (4, 2), "T5 220M": (8, 2)}),
    ],
)
def test_the_presets_of_the_largest_card_that_is_no_larger(gigabytes, sizes):
    memory = None if gigabytes is None else int(gigabytes * 2**30)
    rows = published(PRESETS, memory)
    assert {row["stage"]: (row["micro_batch"], row["accumulation"]) for row in rows} == sizes
    assert all("published for" in row["note"] and "not measured" in row["note"] for row in rows)
