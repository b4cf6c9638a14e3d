"""Benchmarks: raypipe does the work that they time, and the leaderboard of topic-number search."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from unittest.mock import Mock

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
from experiments.pabbo_lda.space import Space
from tests.experiments.pabbo_lda.test_studies import script

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


def ascending(space: Space, seed: int) -> Mock:
    """An optimizer that tries 2, 3, 4, ... and is finished at 12."""
    return script([[T] for T in range(space.t_min, 13)])


def value(T: int, seed: int) -> float:
    """A valley at T = 10, and another level for each seed."""
    return 100 * math.exp(0.1 * abs(math.log(T / 10)) + 0.01 * (seed % 3))


def test_measures_of_a_study_equal_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = product(["valley"], range(42, 52), range(2, 101))
    table = pd.DataFrame(cases, columns=["dataset", "seed", "T"])
    table["perplexity"] = [value(T, seed) for _, seed, T in table.itertuples(index=False)]
    corpus = Corpus("valley", TabularObjective(table), 100)
    monkeypatch.setattr(protocol, "corpora", lambda: {"valley": corpus})
    start = start_of("high", SPACE, 3)
    best, excess, close = min(value(T, 45) for T in start), [], None
    for T in range(2, 13):
        best = min(best, value(T, 45))
        excess.append(math.log(best / value(10, 45)))
        if close is None and excess[-1] <= math.log(1.01):
            close = len(excess)
    excess += excess[-1:] * (BUDGET - len(excess))
    found = study("valley", "high", f"{__name__}:ascending", 3)
    assert found["evaluations"] == close == 9
    assert found["reached"]
    assert found["area"] == pytest.approx(np.mean(excess), abs=1e-12)
    # after 10 evaluations, 2 to 11, the best T is 10
    assert found["regret"] == pytest.approx(0, abs=1e-12)


def studies(areas: dict[str, float]) -> pd.DataFrame:
    """Twenty runs on two corpora; the areas differ by a fixed amount."""
    cases = product("ab", range(20), areas)
    found = pd.DataFrame(cases, columns=["corpus", "run", "optimizer"])
    regret = found["optimizer"].map(areas)
    usual = {"start": "low", "evaluations": 3, "reached": True}
    return found.assign(regret=regret, area=regret + 0.001 * found["run"], **usual)


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
