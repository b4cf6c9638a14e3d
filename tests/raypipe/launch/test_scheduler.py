"""A scheduler that is made anew for a continued sweep decides as one that saw everything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.launch.trials import scheduler_of
from raypipe.study.sweep_settings import SweepSettings

curves = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=9), min_size=2, max_size=8)


class _Trial:
    def __init__(self, number: int) -> None:
        self.trial_id = str(number)


def settings(kind: str) -> SweepSettings:
    axes: Any = {"a": [1]}
    metric: Any = {"metric": "loss_final", "mode": "min"}
    scheduler: Any = {"name": kind, "grace_period": 2}
    return SweepSettings(stage="t", kind="quality", axes=axes, **metric, scheduler=scheduler)


def ended(scheduler: Any, number: int, curve: list[float]) -> int:
    """The step that a trial ends at."""
    trial = _Trial(number)
    scheduler.on_trial_add(None, trial)
    for step, loss in enumerate(curve, start=1):
        if scheduler.on_trial_result(None, trial, {"step": step, "loss": loss}) == "STOP":
            return step
    return len(curve)


@pytest.mark.parametrize("kind", ["asha", "median"])
@given(given_curves=curves, part=st.integers(0, 8))
def test_it_goes_on_from_what_it_had_seen(kind, given_curves, part):
    nothing: Any = SimpleNamespace(settings=settings(kind), history=lambda: (), steps=9)
    whole: Any = scheduler_of(nothing)
    expected = [ended(whole, number, curve) for number, curve in enumerate(given_curves)]

    seen = [
        (str(number), {"step": step, "loss": loss})
        for number, curve in enumerate(given_curves[:part])
        for step, loss in enumerate(curve[: expected[number]], start=1)
    ]
    earlier: Any = SimpleNamespace(settings=settings(kind), history=lambda: seen, steps=9)
    anew: Any = scheduler_of(earlier)
    rest = [ended(anew, part + n, curve) for n, curve in enumerate(given_curves[part:])]
    assert rest == expected[part:]
