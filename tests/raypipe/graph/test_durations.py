"""Expected time: proportional to work, per machine and settings, unknown for what is new."""

from __future__ import annotations

import pytest

from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import Identity
from raypipe.graph.progress import Durations, Estimate, left, remaining
from raypipe.hardware import Gpu, Hardware

NODE = Hardware("here", 2, 2**30)
GPU = Gpu(0, "uuid", "H100", 2**36, "9.0")


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


CHAIN = [stage("a"), stage("b"), stage("c", "a", "b")]
TIMES = {"a": Estimate(10, 10), "b": Estimate(30, 30), "c": Estimate(5, 5)}
UNITS = [Unit("s/free", needs=()), Unit("s/model", needs=("train",))]
EARLY = [stage("train"), Stage("s", lambda context: None, UNITS, ("train",))]


@pytest.mark.parametrize(
    ("stages", "times", "cpus", "gpus", "seconds"),
    [
        (CHAIN, TIMES, 8, 0, 35),
        (CHAIN, TIMES, 1, 0, 45),
        (CHAIN, {**TIMES, "b": None}, 8, 0, None),
        (CHAIN, {name: Estimate(10, 1, 80) for name in "abc"}, 8, 8, 30),
        (CHAIN, {name: Estimate(10, 1, 80) for name in "abc"}, 8, 4, 60),
        # it starts with its first units, and ends after all that it needs
        (EARLY, {"train": Estimate(100), "s": Estimate(40)}, 8, 0, 100),
        (EARLY, {"train": Estimate(100), "s": Estimate(400)}, 8, 0, 400),
    ],
)
def test_stages_take_as_long_as_the_longest_chain_or_as_the_resources_allow(
    stages, times, cpus, gpus, seconds
):
    assert remaining(stages, times, cpus, gpus) == seconds


def test_a_stage_goes_on_at_its_own_rate_once_enough_of_it_is_done():
    assert left(None, 5.0, 0.01) is None
    assert left(None, 5.0, 0.5) == Estimate(5.0)
    assert left(Estimate(10.0, 20.0), 4.0, 0.0) == Estimate(6.0, 12.0)
    assert left(Estimate(10.0, 20.0), 40.0, 0.0) == Estimate(0.0, 0.0)
    assert left(Estimate(10.0, 20.0), 10.0, 0.5) == Estimate(10.0, 20.0)
