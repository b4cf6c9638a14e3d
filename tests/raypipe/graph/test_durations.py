"""Expected time: proportional to work, per machine and settings, unknown for what is new."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.graph.durations import Durations, Estimate, left, remaining
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import Identity
from raypipe.hardware import Gpu, Hardware

NODE = Hardware("here", 2, 2**30)
GPU = Gpu(0, "uuid", "H100", 2**36, "9.0")
SECONDS = st.floats(1e-3, 1e5)


def stage(name: str, *needs: str, budgets: tuple[int, ...] = (1,), **settings: object) -> Stage:
    identity = Identity.of({"experiment": "e", "study": settings}, {})
    units = [Unit(f"{name}/{i}", budget=b, identity=identity) for i, b in enumerate(budgets)]
    return Stage(name, lambda context: None, units, needs)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))


def test_time_is_the_median_rate_times_the_work_that_is_left():
    durations = Durations([NODE])
    measured = stage("s", budgets=(80, 80), seed=1, evaluations=80)
    for seconds in (16.0, 1000.0, 8.0):
        durations.remember(measured, measured.units, Estimate(seconds, 2 * seconds))
    durations.remember(measured, [], Estimate(1.0))
    more = stage("s", budgets=(100, 100, 100), seed=7, evaluations=100)
    found, nothing = durations.estimates([(more, more.units[:2]), (more, [])])
    assert (found.seconds, found.cpu_s) == pytest.approx((20.0, 40.0))
    assert nothing.seconds == 0


def test_other_settings_and_other_machines_are_unknown():
    durations, measured = Durations([NODE]), stage("s", max_iter=5)
    durations.remember(measured, measured.units, Estimate(1.0))
    other = stage("s", max_iter=6)
    assert durations.estimates([(other, other.units)]) == [None]
    larger = Hardware("there", 8, 2**30)
    for nodes in ([larger], [NODE, NODE], [Hardware("here", 2, 2**30, (GPU,))]):
        assert Durations(nodes).estimates([(measured, measured.units)]) == [None]
    renamed = Durations([Hardware("another", 2, 2**31)])
    assert renamed.estimates([(measured, measured.units)]) != [None]


def test_parallel_stages_take_as_long_as_the_longest_or_as_the_resources_allow():
    stages = [stage("a"), stage("b"), stage("c", "a", "b")]
    times = {"a": Estimate(10, 10), "b": Estimate(30, 30), "c": Estimate(5, 5)}
    assert remaining(stages, times, 8, 0) == 35
    assert remaining(stages, times, 1, 0) == 45
    assert remaining(stages, {**times, "b": None}, 8, 0) is None
    trainings = {name: Estimate(10, 1, 80) for name in "abc"}
    assert remaining(stages, trainings, 8, 8) == 30
    assert remaining(stages, trainings, 8, 4) == 60


def test_a_stage_starts_with_its_first_units_and_ends_after_all_that_it_needs():
    units = [Unit("s/free", needs=()), Unit("s/model", needs=("train",))]
    stages = [stage("train"), Stage("s", lambda context: None, units, ("train",))]
    for own, whole in ((40, 100), (400, 400)):
        assert remaining(stages, {"train": Estimate(100), "s": Estimate(own)}, 8, 0) == whole


@given(SECONDS, st.floats(0, 1e6), st.floats(0, 1))
def test_what_is_left_of_a_stage_is_finite_and_nothing_once_all_is_done(seconds, elapsed, part):
    for stored in (Estimate(seconds, 2 * seconds), None):
        found = left(stored, elapsed, part)
        if found is None:
            assert stored is None
            continue
        assert 0 <= found.seconds < math.inf
        assert found.cpu_s >= 0
        if part == 1:
            assert found.seconds == 0


def test_a_stage_goes_on_at_its_own_rate_once_enough_of_it_is_done():
    assert left(None, 5.0, 0.01) is None
    assert left(None, 5.0, 0.5) == Estimate(5.0)
    assert left(Estimate(10.0, 20.0), 4.0, 0.0) == Estimate(6.0, 12.0)
    assert left(Estimate(10.0, 20.0), 40.0, 0.0) == Estimate(0.0, 0.0)
    assert left(Estimate(10.0, 20.0), 10.0, 0.5) == Estimate(10.0, 20.0)
