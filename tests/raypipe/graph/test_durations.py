"""Remembered durations: proportional to work, per machine and settings, unknown for what is new."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.graph.durations import Durations, Estimate, estimate, predict
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import Identity
from raypipe.hardware import Gpu, Hardware

NODE = Hardware("here", 2, 2**30)
GPU = Gpu(0, "uuid", "H100", 2**36, "9.0")


def stage(budgets: list[int], **settings: object) -> Stage:
    identity = Identity.of({"experiment": "e", "study": settings}, {})
    units = [Unit(f"s/{i}", budget=b, identity=identity) for i, b in enumerate(budgets)]
    return Stage("s", lambda context: None, units)


def featured(budget: int = 1, *, topics: int, documents: int = 100, **settings: object) -> Stage:
    """A stage whose settings ``topics`` and ``documents`` are its features."""
    values = {"topics": topics, "documents": documents}
    plain = stage([budget], **settings, **values)
    keys = tuple(f"study.{name}" for name in values)
    return replace(plain, features=values, featured=keys)


def ask(durations: Durations, asked: Stage) -> Estimate | None:
    (found,) = durations.estimates([(asked, asked.units)])
    return found


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


def seconds(features: Mapping[str, float], work: float = 1.0) -> float:
    return work * 0.01 * features["topics"] ** 0.8 * features["documents"] ** 1.1


def remember(durations: Durations, *stages: Stage) -> None:
    for each in stages:
        took = seconds(each.features, sum(unit.budget for unit in each.units))
        durations.remember(each, each.units, row(took, cpu_s=2 * took))


def test_other_values_of_features_are_predicted_from_runs_that_differ_in_them():
    durations = Durations([NODE])
    remember(durations, *(featured(budget=3, topics=T, seed=T) for T in (10, 20, 40)))
    remember(durations, *(featured(topics=10, documents=D) for D in (50, 200)))
    asked = featured(budget=7, topics=30, documents=150)
    found = ask(durations, asked)
    assert found is not None
    expected = seconds(asked.features, 7)
    assert (found.seconds, found.cpu_s) == pytest.approx((expected, 2 * expected))
    assert found.low == pytest.approx(found.high) == pytest.approx(expected)
    assert ask(Durations([NODE, NODE]), asked) is None
    assert ask(durations, featured(topics=30, documents=150, max_iter=6)) is None


def test_runs_with_the_same_settings_come_before_a_prediction():
    durations = Durations([NODE])
    remember(durations, *(featured(topics=T) for T in (10, 15, 30, 40)))
    same = featured(topics=20)
    assert ask(durations, same).seconds == pytest.approx(seconds(same.features))
    durations.remember(same, same.units, row(1000.0))
    assert ask(durations, same).seconds == pytest.approx(1000.0)
    assert ask(durations, same).low is None


def test_repeated_runs_do_not_make_a_prediction():
    durations = Durations([NODE])
    remember(durations, *(featured(topics=T) for T in (10, 20, 40) * 10))
    assert ask(durations, featured(topics=30)) is None
    remember(durations, featured(topics=30))
    assert ask(durations, featured(topics=25)) is not None


@pytest.mark.parametrize(
    ("topics", "documents", "known"),
    [(5, 100, True), (80, 100, True), (4, 100, False), (81, 100, False), (20, 101, False)],
)
def test_values_far_from_the_measured_ones_are_unknown(topics, documents, known):
    """A factor of 2 beyond what varied, nothing beyond what did not."""
    durations = Durations([NODE])
    remember(durations, *(featured(topics=T) for T in (10, 15, 30, 40)))
    found = ask(durations, featured(topics=topics, documents=documents))
    assert (found is not None) == known


@given(st.integers(0, 12), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_prediction_needs_three_more_runs_than_varied_features(count, features, seed):
    generator = np.random.default_rng(seed)
    names = [f"f{i}" for i in range(features)]
    runs = [
        {
            **row(1.0),
            "work": 1.0,
            "features": dict(zip(names, generator.uniform(10, 20, features), strict=True)),
        }
        for _ in range(count)
    ]
    asked = dict.fromkeys(names, 15.0)
    assert (predict(runs, asked, 1.0) is not None) == (count >= features + 3)


def test_features_that_always_change_together_are_not_separated():
    points = [{"a": x, "b": x**2} for x in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    runs = [{**row(p["a"]), "work": 1.0, "features": p} for p in points]
    assert predict(runs, {"a": 3.0, "b": 16.0}, 1.0) is None


def test_an_interval_beyond_a_factor_of_ten_is_unknown():
    runs = [
        {**row(took), "work": 1.0, "features": {"a": a}}
        for a, took in ((1.0, 1.0), (2.0, 100.0), (3.0, 1.0), (4.0, 100.0))
    ]
    assert predict(runs, {"a": 2.5}, 1.0) is None


def test_four_of_five_next_runs_lie_in_the_interval():
    """The coverage of 5000 intervals is within 4 standard errors of the nominal 80 %."""
    generator, trials = np.random.default_rng(1), 5000
    inside = 0
    for _ in range(trials):
        topics, documents = np.exp(generator.uniform(0, 2, (2, 7)))
        points = [{"topics": t, "documents": d} for t, d in zip(topics, documents, strict=True)]
        asked = points.pop()
        asked = {
            name: min(max(value, min(p[name] for p in points)), max(p[name] for p in points))
            for name, value in asked.items()
        }
        noise = np.exp(generator.normal(0, 0.05, 7))
        runs = [
            {**row(3 * seconds(point) * factor), "work": 3.0, "features": point}
            for point, factor in zip(points, noise, strict=False)
        ]
        found = predict(runs, asked, 2.0)
        assert found is not None
        inside += found.low <= 2 * seconds(asked) * noise[-1] <= found.high
    assert abs(inside / trials - 0.8) < 4 * math.sqrt(0.8 * 0.2 / trials)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_feature_that_is_not_positive_is_refused(value):
    with pytest.raises(ValueError, match="stage 's': feature 'size'"):
        Stage("s", lambda context: None, features={"size": value})
