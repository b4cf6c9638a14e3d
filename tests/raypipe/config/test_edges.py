"""Best values at the end of an axis."""

from __future__ import annotations

import pytest

from raypipe.config.axes import AxisSettings
from raypipe.config.edges import edge_of_axis, edge_of_values, possible


@pytest.mark.parametrize(
    ("values", "best", "further"),
    [
        ([8, 16, 32], 32, (64, 128)),
        ([8, 16, 32], 8, (4, 2)),
        ([8, 16, 32], 16, None),
        ([32], 32, None),
        ([1e-4, 1e-3], 1e-4, (1e-5, 1e-6)),
        ([10, 12, 14], 14, (16, 18)),
        ([1, 2, 4], 1, ()),  # a half is not an integer, and 0 is another thing
        (["fp32", "bf16"], "bf16", None),
        ([False, True], True, None),
        ([None, 4, 8], 8, None),
        ([0.0, 0.1], 0.0, ()),  # a negative one may mean something else
    ],
)
def test_a_value_at_the_end_of_a_list(values, best, further) -> None:
    edge = edge_of_values(values, best)
    assert (None if edge is None else edge.further) == (
        None if further is None else pytest.approx(further)
    )


def test_a_value_near_the_end_of_a_range() -> None:
    axis = AxisSettings(low=1e-4, high=1e-2, log=True)
    edge = edge_of_axis(axis, 9.9e-3)
    assert edge is not None
    assert edge.is_largest
    assert edge.further == pytest.approx((0.1, 1.0))
    assert edge_of_axis(axis, 5e-3) is None
    assert edge_of_axis(AxisSettings(low=2, high=100), 3) is not None
    assert edge_of_axis(AxisSettings(values=(4, 8)), 8) == edge_of_values([4, 8], 8)
    assert edge_of_axis(AxisSettings(values=("a", "b")), "b") is None


def test_what_is_not_allowed_is_not_proposed() -> None:
    edge = edge_of_values([8, 16], 16)
    kept = possible(edge, lambda value: value < 50)
    assert kept is not None
    assert kept.further == (32,)
    assert kept.remark("training.micro_batch", "sweep.axes.training.micro_batch") == (
        "the best training.micro_batch is the largest that was tried (16): try larger ones, e.g. "
        "'sweep.axes.training.micro_batch=[16,32]'"
    )
    assert possible(edge, lambda value: False) is None
    assert possible(None, lambda value: True) is None
