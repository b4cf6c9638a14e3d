"""Benchmarks: raypipe does the work that they time, and the leaderboard of topic-number search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
import pytest

from benchmarks.scaling import calls
from benchmarks.topics import protocol
from benchmarks.topics.leaderboard import against_control, leaderboard, medians
from benchmarks.topics.protocol import BUDGET, Corpus, start_of, study
from benchmarks.trials import by_raypipe
from benchmarks.trials.__main__ import measure
from benchmarks.trials.experiment import sweep_of
from experiments.pabbo_lda.objective.objectives import TabularObjective
from experiments.pabbo_lda.space import Point, Space

SPACE = Space(2, 100)


def test_the_benchmark_of_calls_compares_the_processes_of_two_commands() -> None:
    case = calls.CallCase("empty", 4, (("joblib", 1.5),), local=True)
    found = calls.summarize(case, calls.rounds(case, 1))
    assert 0 < found["cpu_s"]["median"] <= found["tree_cpu_s"]["median"]
    assert found["joblib"]["cpu"]["median"] > 0
    assert found["peak_bytes"]["median"] > 10**7


def test_the_benchmark_of_trials_trains_and_times_every_point() -> None:
    study = sweep_of(2, 1, 5)
    row, losses = measure(partial(by_raypipe.sweep, local=True), study, 1)
    assert len(losses) == 2
    assert all(loss > 0 for loss in losses)
    assert 0 < row["overhead_s"] < row["wall_s"]


class Ascending:
    """An optimizer that tries 2, 3, 4, ... and is finished at 12."""

    def __init__(self, space: Space, seed: int) -> None:
        del seed
        self._next = space.t_min

    def ask(self) -> list[Point]:
        self._next += 1
        return [Point(self._next - 1)] if self._next <= 13 else []

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        pass


def value(T: int, seed: int) -> float:
    """A valley at T = 10, and another level for each seed."""
    return 100 * math.exp(0.1 * abs(math.log(T / 10)) + 0.01 * (seed % 3))


def test_measures_of_a_study_equal_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"dataset": "valley", "seed": seed, "T": T, "perplexity": value(T, seed)}
        for seed in range(42, 52)
        for T in range(2, 101)
    ]
    corpus = Corpus("valley", TabularObjective(pd.DataFrame(rows)), 100)
    monkeypatch.setattr(protocol, "corpora", lambda: {"valley": corpus})
    start = start_of("high", SPACE, 3)
    best, excess, close = min(value(T, 45) for T in start), [], None
    for T in range(2, 13):
        best = min(best, value(T, 45))
        excess.append(math.log(best / value(10, 45)))
        if close is None and excess[-1] <= math.log(1.01):
            close = len(excess)
    excess += excess[-1:] * (BUDGET - len(excess))
    found = study("valley", "high", f"{__name__}:Ascending", 3)
    assert found["evaluations"] == close == 9
    assert found["reached"]
    assert found["area"] == pytest.approx(np.mean(excess), abs=1e-12)
    # after 10 evaluations, 2 to 11, the best T is 10
    assert found["regret"] == pytest.approx(0, abs=1e-12)


def studies(areas: dict[str, float]) -> pd.DataFrame:
    """Twenty runs on two corpora; the areas differ by a fixed amount."""
    rows = [
        {
            **{"corpus": corpus, "start": "low", "run": run, "optimizer": name},
            **{"area": area + 0.001 * run, "regret": area, "evaluations": 3, "reached": True},
        }
        for corpus in ("a", "b")
        for run in range(20)
        for name, area in areas.items()
    ]
    return pd.DataFrame(rows)


def test_leaderboard_counts_corpora_with_clear_differences() -> None:
    table = leaderboard(studies({"gp_ei": 0.2, "good": 0.1, "bad": 0.3, "equal": 0.2}))
    rows = table.set_index("optimizer")
    assert table.loc[0, "optimizer"] == "good"
    assert list(rows.loc["good", ["better", "worse"]]) == [2, 0]
    assert list(rows.loc["bad", ["better", "worse"]]) == [0, 2]
    assert list(rows.loc["equal", ["better", "worse"]]) == [0, 0]
    assert rows.loc["good", "rank"] == 1
    assert rows.loc["good", "rank_half"] == 0


def test_tests_are_corrected_for_all_corpora_and_optimizers() -> None:
    tests = against_control(studies({"gp_ei": 0.2, "good": 0.1, "bad": 0.3}))
    assert len(tests) == 4
    assert tests["p_holm"].min() == pytest.approx(4 * tests["p_value"].min())


@pytest.mark.parametrize(("never", "median"), [(9, 3), (10, np.inf), (11, np.inf)])
def test_a_median_is_infinite_if_half_of_the_searches_do_not_come_close(never, median) -> None:
    found = studies({"gp_ei": 0.2}).query("corpus == 'a'")
    lost = found["run"] < never
    found.loc[lost, ["reached", "evaluations"]] = [False, 31]
    assert medians(found).loc[("a", "low"), "gp_ei"] == median
    assert leaderboard(found).loc[0, "evaluations"] == median
