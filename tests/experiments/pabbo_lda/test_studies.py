"""A study, and concurrent studies on made-up values and a pool that ends tasks in any order."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat, starmap
from operator import attrgetter
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.pabbo_lda.objective.objectives import CorpusObjective
from experiments.pabbo_lda.settings import LdaSettings
from experiments.pabbo_lda.space import Point
from experiments.pabbo_lda.study.evaluations import lda_seeds
from experiments.pabbo_lda.study.runner import run_studies, study_specs
from experiments.pabbo_lda.study.study import PATIENCE, Study
from raypipe.errors import UnitError
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Stage
from raypipe.graph.launcher import TaskResult
from raypipe.launch.inline import InlineLauncher
from raypipe.store.cache import Cache
from raypipe.store.ledger import Ledger
from tests.experiments.pabbo_lda.test_optimizers import finish, points
from tests.raypipe.composed import composed, session_in


def script(batches: list[list[int]]) -> Mock:
    """An optimizer that asks for given batches of T and remembers what it is told."""
    return Mock(**{"ask.side_effect": chain(starmap(points, batches), repeat([]))})


def test_tells_whole_batches_in_the_order_asked():
    optimizer = script([[5, 9, 5, 7], [7, 3]])
    study = Study(optimizer, points(7, 2, 7), budget=10)
    assert study.request() == points(7, 2)
    study.supply(Point(2), 2.0)
    assert study.request() == points(7)
    assert (study.evaluated, len(study.history), optimizer.tell.called) == (1, 0, False)
    study.supply(Point(7), 7.0)
    assert study.request() == points(5, 9)
    finish(study, attrgetter("T"))
    told = [(points(*batch), batch) for batch in ([7, 2, 7], [5, 9, 5, 7], [7, 3])]
    assert [call.args for call in optimizer.tell.call_args_list] == told
    assert (study.done, study.request(), study.asked) == (True, [], 3 + 4 + 2)
    rows = [(e.evaluation, e.batch, e.point.T, e.best_value) for e in study.history]
    assert rows == [(1, 0, 7, 7), (2, 0, 2, 2), (3, 1, 5, 2), (4, 1, 9, 2), (5, 2, 3, 2)]


@pytest.mark.parametrize(
    ("iterations", "batches", "found", "told"),
    [
        (None, [[7]] * 19 + [[8]] + [[7, 8]] * 50, [(7, 0), (8, 20)], 1 + 19 + 1 + PATIENCE),
        (3, [[7], [8], [9], [10]], [(7, 0), (8, 2), (9, 3)], 1 + 3),
        (0, [[7], [8], [9], [10]], [(7, 0)], 1),
    ],
)
def test_ends_after_its_iterations_or_twenty_without_a_new_point(iterations, batches, found, told):
    optimizer = script(batches)
    study = Study(optimizer, points(7), budget=99, iterations=iterations)
    assert [(e.point.T, e.batch) for e in finish(study, attrgetter("T")).history] == found
    assert optimizer.tell.call_count == told


def test_values_that_are_not_finite_are_kept_but_never_best():
    values = {2: math.nan, 3: math.inf, 4: 5.0, 5: -math.inf, 6: math.nan}
    for batches, best in (([], None), ([[4], [5, 6]], (Point(4), 5.0))):
        study = Study(script(batches), points(2, 3), budget=9)
        assert finish(study, lambda point: values[point.T]).best == best
    assert [e.best_point for e in study.history] == [None, None, *[Point(4)] * 3]
    assert [e.best_value for e in study.history] == [math.inf, math.inf, *[5.0] * 3]
    assert math.isnan(study.history[0].value)


OPTIMIZERS = ("ga", "es", "tpe", "golden_section")
DATASETS = ("hills", "slope")


class ShuffledLauncher(InlineLauncher):
    """Runs what waits in any order, some at a time; ``fate`` may end a task before it runs."""

    def __init__(self, random: Random, fate: Callable[[str], TaskResult | None]) -> None:
        super().__init__()
        self.random, self.fate = random, fate
        self.capacity = random.choice([1.0, 2.0, 7.0])
        self.in_flight, self.submitted, self.ran = [], [], []

    @contextmanager
    def pool(self, options, say=print, rank=0.0, seconds=math.inf):
        yield self

    @property
    def has_room(self) -> bool:
        return len(self.in_flight) < 2 * self.capacity

    def share(self, value):
        return value

    def submit(self, key, function, *arguments, cpus=None):
        assert self.has_room or not self.in_flight
        self.submitted.append(key)
        self.in_flight.append((key, partial(function, *arguments)))

    def finished(self) -> list[TaskResult]:
        self.random.shuffle(self.in_flight)
        ending = self.random.randint(1, 4)
        ended, self.in_flight = self.in_flight[:ending], self.in_flight[ending:]
        return [self.fate(key) or self.run(key, call) for key, call in ended]

    def run(self, key, call) -> TaskResult:
        self.ran.append(key)
        return TaskResult(key, call(), duration_s=1.0, cpu_s=0.5)


def noisy(dataset: str, seed: int, T: int) -> float:
    """The value of a noisy curve over T, for any seed."""
    best = {"hills": 12, "slope": 2}[dataset]
    noise = np.random.default_rng((seed, T)).normal(0, 0.05)
    return float(np.exp(np.log(T / best) ** 2 + noise))


def study_settings(**changed) -> LdaSettings:
    """Studies without the cache."""
    usual = {"datasets": DATASETS, "optimizers": OPTIMIZERS, "runs": 2, "seed": 0, "t_max": 200}
    usual |= {"start": (150, 90, 190), "evaluations": 12, "final_seeds": 0, "cache": False}
    return LdaSettings(**{**usual, **changed})


def run(folder: Path, lda: LdaSettings, seed: int = 0, fate=lambda key: None, cost: int = 0):
    """The ledger, the launcher and the error of the stage; ``cost`` is the objectives' counts."""
    launcher = ShuffledLauncher(Random(seed), fate)
    session = session_in(folder, launcher)
    objectives = [
        CorpusObjective(name, "tabular", {"corpus": name}, Mock(value=noisy), counts=cost)
        for name in lda.datasets
    ]
    specs = study_specs(lda, objectives)
    units = [spec.unit(lda, None) for spec in specs]
    (stage,) = composed([Stage("lda", lambda context: None, units)])
    error = None
    try:
        with Cache("evaluations", enabled=lda.cache) as cache:
            run_studies(StageContext(stage, session), lda, specs, lambda optimizer: None, cache)
    except (KeyboardInterrupt, UnitError) as caught:
        error = caught
    return session.ledger, launcher, error


def interrupted_after(tasks: int) -> Callable[[str], None]:
    """Return a fate of tasks: all after the first ones end in a KeyboardInterrupt."""
    return Mock(side_effect=chain(repeat(None, tasks), repeat(KeyboardInterrupt)))


def outcome(ledger: Ledger) -> dict[str, Any]:
    """All that a continuation must not change."""
    values = {key: row["value"] for key, row in ledger.items("evaluations")}
    tables = {name: dict(ledger.items(name)) for name in ("studies", "study_history")}
    return {"values": values, **tables}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Any]:
    return outcome(run(tmp_path_factory.mktemp("undisturbed"), study_settings())[0])


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    budget=st.integers(1, 12),
    kills=st.lists(st.integers(0, 120), max_size=3),
)
def test_kills_and_the_order_do_not_matter(seed, budget, kills, undisturbed, tmp_path_factory):
    """Nor does a smaller budget before: the studies are the same."""
    folder = tmp_path_factory.mktemp("run")
    ran = run(folder, study_settings(evaluations=budget), seed)[1].ran
    for number, kill in enumerate([*kills, 10**6], 1):
        lda = study_settings()
        ledger, pool, _ = run(folder, lda, seed + number, interrupted_after(kill))
        ran += pool.ran
    assert outcome(ledger) == undisturbed
    # what ended together with the killed one may not have been stored
    assert len(ran) <= len(ledger.rows("evaluations")) + 3 * len(kills)


@pytest.mark.usefixtures("cache")
def test_another_run_directory_takes_over_what_is_known(undisturbed, tmp_path):
    lda = study_settings(cache=True)
    run(tmp_path / "first", lda.model_copy(update={"runs": 1}))
    ledger, pool, _ = run(tmp_path / "second", lda)
    again, idle, _ = run(tmp_path / "third", lda)
    assert outcome(ledger) == outcome(again) == undisturbed
    assert not idle.ran
    assert 0 < len(pool.ran) < len(ledger.rows("evaluations"))
    assert all(row["cached"] for row in again.rows("evaluations"))
    assert {row["cached"] for row in ledger.rows("evaluations")} == {True, False}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_a_failure_and_the_worst_of_all(value, tmp_path):
    def fate(key: str) -> TaskResult | None:
        odd = key.startswith("hills/seed 0/") and int(key.rpartition("/")[2].strip("T=")) % 2
        return TaskResult(key, value, duration_s=1.0, cpu_s=0.5) if odd else None

    ledger, _, error = run(tmp_path / "run", study_settings(), fate=fate)
    assert error is None
    odd = [row for row in ledger.rows("evaluations") if not math.isfinite(row["value"])]
    failures = ledger.rows("failures")
    assert len(odd) == len(failures) > 0
    found = {(row["kind"], row["message"]) for row in failures}
    assert found == {("invalid_value", f"the value is {value}")}
    best = [row for row in ledger.rows("studies") if row["dataset"] == "hills" and row["seed"] == 0]
    assert best
    assert all(row["best_T"] % 2 == 0 and math.isfinite(row["best_perplexity"]) for row in best)


def test_an_evaluation_that_fails_for_good_breaks_its_studies_alone(undisturbed, tmp_path):
    def fate(key: str) -> TaskResult | None:
        if key == "hills/seed 0/T=150":  # every study of that corpus and seed starts with it
            return TaskResult(key, error="took too long", kind="timeout")
        return None

    ledger, _, error = run(tmp_path / "run", study_settings(), fate=fate)
    assert isinstance(error, UnitError)
    assert error.kind == "timeout"
    done = {row["optimizer"] for row in ledger.rows("studies") if row["dataset"] == "hills"}
    assert done == set(OPTIMIZERS)  # of the other run
    assert len(ledger.rows("studies")) == len(undisturbed["studies"]) - len(OPTIMIZERS)
    assert [row["kind"] for row in ledger.rows("failures")] == ["timeout"]
    assert outcome(run(tmp_path / "run", study_settings())[0]) == undisturbed


def test_the_longest_path_is_served_first(tmp_path):
    lda = study_settings(optimizers=("random",), datasets=("hills",), runs=1)
    _, pool, _ = run(tmp_path / "run", lda, cost=10**6)  # the more topics, the longer
    assert pool.submitted[:3] == [f"hills/seed 0/T={T}" for T in (190, 150, 90)]


def test_a_stored_history_that_the_optimizer_does_not_repeat_is_refused(undisturbed, tmp_path):
    """Another release of its library proposes other points; the other studies are finished."""
    ledger, _, _ = run(tmp_path / "run", study_settings(evaluations=7))
    key = "lda/hills/tpe/0"
    stored = ledger.get("study_history", f"{key}/4")  # after the start
    T = stored["T"]
    ledger.put("study_history", {f"{key}/4": {**stored, "T": T + 1}})
    before = outcome(ledger)
    ledger, _, error = run(tmp_path / "run", study_settings())
    assert isinstance(error, UnitError)
    assert error.message == (
        f"the stored history of {key} cannot be continued: the optimizer proposed T={T}, stored "
        f"T={T + 1} at evaluation 4; use the versions that recorded it, or another --run-dir"
    )
    failures = [(row["unit"], row["message"]) for row in ledger.rows("failures")]
    assert failures == [(key, error.message)]
    after = outcome(ledger)
    assert after["studies"].keys() == undisturbed["studies"].keys()
    for table in ("studies", "study_history"):
        for name, row in after[table].items():
            assert row == (before if name.startswith(key) else undisturbed)[table][name]
    ledger.put("study_history", {f"{key}/4": stored})
    assert outcome(run(tmp_path / "run", study_settings())[0]) == undisturbed


@settings(max_examples=5, deadline=None)
@given(order=st.integers(0, 2**32), seeds=st.integers(1, 3), kill=st.integers(1, 60))
def test_a_value_is_the_mean_of_fits_that_are_computed_once(order, seeds, kill, tmp_path_factory):
    """Also of studies that ask for the same, after a kill, and in the final comparison."""
    of = {"optimizers": ("random", "tpe"), "evaluations": 6, "final_seeds": 2}
    lda = study_settings(**of, seeds=seeds)
    folder = tmp_path_factory.mktemp("run")
    whole, every, error = run(tmp_path_factory.mktemp("whole"), lda, order)
    assert error is None
    assert len(every.ran) == len(set(every.ran)) == len(whole.rows("evaluations"))
    run(folder, lda, order, interrupted_after(kill))
    ledger, _, _ = run(folder, lda, order + 1)
    assert outcome(ledger) == outcome(whole)
    for row in ledger.rows("study_history"):
        fits = [noisy(row["dataset"], n, row["T"]) for n in lda_seeds(row["seed"], seeds)]
        assert row["value"] == pytest.approx(fmean(fits))
        assert row["lda_seeds"] == seeds
        assert row["cpu_s"] == pytest.approx(row["elapsed_s"] / 2)
    studies = ledger.rows("studies")
    assert [row["unique_evaluations"] for row in studies] == [6] * len(DATASETS) * 2 * 2
    for row in studies:
        unseen = lda_seeds(row["seed"], seeds + 2)[seeds:]
        expected = fmean(noisy(row["dataset"], seed, row["best_T"]) for seed in unseen)
        assert row["confirmed_value"] == pytest.approx(expected)
        assert row["duration_s"] == 6 * seeds  # of the search alone
