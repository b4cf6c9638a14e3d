"""Remembered durations: proportional to work, per machine and settings, unknown for what is new."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.hardware import Gpu, Hardware
from raypipe.pipeline.durations import Durations, estimate
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.identity import Identity

NODE = Hardware("here", 2, 2**30)
GPU = Gpu(0, "uuid", "H100", 2**36, "9.0")


def stage(budgets: list[int], **settings: object) -> Stage:
    identity = Identity.of({"experiment": "e", "study": settings}, {})
    units = [Unit(f"s/{i}", budget=b, identity=identity) for i, b in enumerate(budgets)]
    return Stage("s", lambda context: None, units)


def row(seconds: float, cpu_s: float = 0.0) -> dict[str, float]:
    return {"seconds": seconds, "cpu_s": cpu_s, "gpu_s": 0.0}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))


def test_time_is_proportional_to_the_work_that_is_left():
    durations, measured = Durations([NODE]), stage([80, 80], seed=1, evaluations=80)
    durations.remember(measured, measured.units, row(16.0, cpu_s=32.0))
    more = stage([100, 100, 100], seed=7, evaluations=100)
    (found,) = durations.estimates([(more, more.units[:2])])
    assert found is not None
    assert (found.seconds, found.cpu_s) == pytest.approx((20.0, 40.0))
    assert found.low is None


def test_other_settings_and_other_machines_are_unknown():
    durations, measured = Durations([NODE]), stage([10], max_iter=5)
    durations.remember(measured, measured.units, row(1.0))
    other = stage([10], max_iter=6)
    assert durations.estimates([(other, other.units)]) == [None]
    larger = Hardware("there", 8, 2**30)
    for nodes in ([larger], [NODE, NODE], [Hardware("here", 2, 2**30, (GPU,))]):
        assert Durations(nodes).estimates([(measured, measured.units)]) == [None]
    renamed = Durations([Hardware("another", 2, 2**31)])
    assert renamed.estimates([(measured, measured.units)]) != [None]


def test_nothing_to_do_takes_no_time_and_is_not_remembered():
    durations, measured = Durations([NODE]), stage([10])
    durations.remember(measured, [], row(1.0))
    assert durations.estimates([(measured, measured.units)]) == [None]
    durations.remember(measured, measured.units, row(1.0))
    (found,) = durations.estimates([(measured, [])])
    assert found is not None
    assert found.seconds == 0


positive = st.floats(1e-3, 1e6)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=20), positive)
def test_the_estimate_lies_between_the_measured_rates_and_in_its_interval(runs, amount):
    rows = [{"work": w, "seconds": s, "cpu_s": s, "gpu_s": 0.0} for w, s in runs]
    found = estimate(rows, amount)
    rates = [s / w for w, s in runs]
    assert min(rates) * amount <= found.seconds * (1 + 1e-9)
    assert found.seconds <= max(rates) * amount * (1 + 1e-9)
    assert found.low <= found.seconds * (1 + 1e-9)
    assert found.seconds <= found.high * (1 + 1e-9) or math.isinf(found.high)
