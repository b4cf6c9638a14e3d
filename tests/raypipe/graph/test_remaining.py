"""Remaining time of a run: exact for chains, bounded by resources, monotone, honest if unknown."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.graph.durations import Estimate
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.remaining import Forecast, Progress, left


def stage(name: str, *needs: str, units: list[Unit] | None = None) -> Stage:
    return Stage(name, lambda context: None, units or [Unit(name)], needs)


def known(seconds: float, cpu_s: float = 0.0, gpu_s: float = 0.0) -> Estimate:
    return Estimate(seconds, seconds / 2, 2 * seconds, cpu_s, gpu_s)


SECONDS = st.floats(1e-3, 1e5)
ESTIMATES = st.builds(known, SECONDS, SECONDS, SECONDS)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Stage], dict[str, Estimate | None]]:
    names = [f"s{number}" for number in range(draw(st.integers(1, 8)))]
    stages = [
        stage(name, *(draw(st.lists(st.sampled_from(names[:place]), unique=True)) if place else ()))
        for place, name in enumerate(names)
    ]
    return stages, {name: draw(ESTIMATES) for name in names}


@given(st.lists(SECONDS, min_size=1, max_size=8))
def test_a_chain_takes_the_sum_of_its_stages(seconds):
    names = [str(number) for number in range(len(seconds))]
    stages = [stage(name, *names[:place][-1:]) for place, name in enumerate(names)]
    found = Forecast(stages, dict(zip(names, map(known, seconds), strict=True)), 2).of_run(
        {}, [], 0.0
    )
    whole = sum(seconds)
    assert (found.seconds, found.low, found.high) == pytest.approx((whole, whole / 2, whole * 2))
    assert not found.unknown


@given(graphs(), st.data())
def test_more_work_never_takes_less_time_and_ended_stages_none(graph, data):
    stages, estimates = graph
    forecast = Forecast(stages, estimates, 2, 1)
    before = forecast.of_run({}, [], 0.0)
    assert 0 <= before.low <= before.seconds <= before.high
    assert before.seconds >= max(each.seconds for each in estimates.values())
    assert before.seconds >= sum(each.cpu_s for each in estimates.values()) / 2 * (1 - 1e-9)
    name = data.draw(st.sampled_from(sorted(estimates)))
    more = {**estimates, name: known(estimates[name].seconds + 10, estimates[name].cpu_s + 5)}
    more[name] = known(more[name].seconds, more[name].cpu_s, estimates[name].gpu_s)
    assert Forecast(stages, more, 2, 1).of_run({}, [], 0.0).seconds >= before.seconds * (1 - 1e-9)
    assert forecast.of_run({}, [name], 0.0).seconds <= before.seconds * (1 + 1e-9)
    assert forecast.of_run({}, list(estimates), 0.0).seconds == 0


def test_parallel_stages_take_as_long_as_the_longest_or_as_the_resources_allow():
    stages = [stage("a"), stage("b"), stage("c", "a", "b")]
    times = {"a": known(10, 10), "b": known(30, 30), "c": known(5, 5)}
    assert Forecast(stages, times, 8).of_run({}, [], 0.0).seconds == 35
    assert Forecast(stages, times, 1).of_run({}, [], 0.0).seconds == 45
    trainings = {name: known(10, 1, 80) for name in "abc"}
    assert Forecast(stages, trainings, 8, 8).of_run({}, [], 0.0).seconds == 30
    assert Forecast(stages, trainings, 8, 4).of_run({}, [], 0.0).seconds == 60


def test_only_the_units_that_need_a_stage_have_to_follow_it():
    units = [Unit("s/free", needs=()), Unit("s/model", needs=("train",))]
    stages = [stage("train"), stage("s", "train", units=units)]
    times = {"train": known(100), "s": known(40)}
    assert Forecast(stages, times, 8).of_run({}, [], 0.0).seconds == 120
    assert Forecast(stages, {**times, "s": known(400)}, 8).of_run({}, [], 0.0).seconds == 400


def test_unknown_stages_make_the_rest_a_lower_bound():
    stages = [stage("a"), stage("new", "a")]
    found = Forecast(stages, {"a": known(60), "new": None}, 2).of_run({}, [], 0.0)
    assert (found.seconds, found.low, found.high, found.unknown) == (30, None, None, 1)
    assert Forecast(stages, {}, 2).of_run({}, [], 0.0).seconds == 0
    half = Progress(began=0.0, total=10, done=5)
    rest = Forecast(stages, {"a": known(60), "new": None}, 2).of_run({"new": half}, ["a"], 8.0)
    assert (rest.seconds, rest.low, rest.unknown) == (8, None, 0)


def test_an_interval_needs_one_of_every_stage():
    stages = [stage("a"), stage("b", "a")]
    once = Estimate(10.0, None, None, 0.0, 0.0)
    found = Forecast(stages, {"a": known(10), "b": once}, 2).of_run({}, [], 0.0)
    assert (found.seconds, found.low, found.high) == (20, None, None)
    endless = Estimate(10.0, 1.0, math.inf, 0.0, 0.0)
    assert Forecast(stages, {"a": known(10), "b": endless}, 2).of_run({}, [], 0.0).high is None


@given(SECONDS, st.floats(0, 1e6), st.integers(0, 50), st.integers(1, 50), st.integers(0, 60))
def test_what_is_left_of_a_stage_is_finite_and_nothing_once_all_is_done(
    seconds, elapsed, first, total, done
):
    progress = Progress(100.0, first + total, first, first + min(done, total))
    for stored in (known(seconds, 2 * seconds), None):
        found = left(stored, progress, 100.0 + elapsed)
        if found is None:
            assert stored is None
            continue
        assert 0 <= found.seconds < math.inf
        assert found.cpu_s >= 0
        if done >= total:
            assert found.seconds == 0


@given(st.integers(1, 99), st.floats(1, 1e5))
def test_a_stage_that_advances_as_expected_has_its_remaining_part_left(percent, seconds):
    progress = Progress(0.0, 100, 0, percent)
    found = left(known(seconds), progress, seconds * percent / 100)
    assert found.seconds == pytest.approx(seconds * (1 - percent / 100))
    slow = left(known(seconds), progress, 2 * seconds * percent / 100)
    assert found.seconds <= slow.seconds <= 2 * seconds * (1 - percent / 100)


def test_the_first_steps_of_something_new_say_nothing_yet():
    assert left(None, Progress(0.0, 1000, 0, 10), 5.0) is None
    assert left(None, Progress(0.0, 1000, 0, 500), 5.0).seconds == 5
    assert left(known(10), Progress(0.0), 4.0).seconds == 6
    assert left(known(10), Progress(0.0), 40.0).seconds == 0
