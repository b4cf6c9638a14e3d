"""Races of a matrix: seeds until the statistics decide, and no winner before."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.config.search import RaceSettings
from raypipe.stats import runs_needed
from raypipe.study.race import Run, Standing, eliminate, first_runs, runs_for_power, standing
from tests.raypipe.study.test_search import HILL, killed, ran, table
from tests.raypipe.toy import raypipe

RACE = """
experiment: hill
matrix:
  fit.layers: [2, 3, 6]
  race: {metric: measures.value, where: {method: judge}, most_runs: 12}
"""

#: the value depends on the layers, and on the seed
NOISE = """
    rng = __import__("random").Random(f"{s.seed} {s.layers}")
    value = abs(s.layers - 3) + rng.gauss(0, 0.2)
    context.ledger.put("measures", """


@pytest.fixture
def hill(work: Path) -> Iterator[Path]:
    code = HILL.replace('\n    context.ledger.put("measures", ', NOISE, 1)
    (work / "hill.py").write_text(code)
    (work / "hill.yaml").write_text(RACE)
    yield work
    sys.modules.pop("hill", None)


def test_a_race_drops_what_is_worse_and_names_the_winner(hill, capsys):
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    output = capsys.readouterr().out
    assert "race: fit.layers=6 dropped" in output
    assert "fit.layers=3 wins with 7 seeds" in output
    race = table(hill / "run", "race")
    last = race[race["round"] == race["round"].max()].set_index("point")["status"]
    assert last[json.dumps({"fit.layers": 3})] == "winner"
    assert race["runs"].min() == runs_needed(2)
    assert ran(hill) == {"prepare": 1, "fit": 21, "judge": 21}
    means = table(hill / "run", "measures").query("method == 'judge'").groupby("variant")["value"]
    assert means.count().eq(1).all()
    page = (hill / "run/report/index.html").read_text()
    assert "fit.layers=3 wins with a mean of" in page
    assert len(table(hill / "run", "variant_tests"))
    capsys.readouterr()
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_killed_race_continues_as_if_nothing_had_happened(hill):
    assert raypipe("run", "hill.yaml", "--run-dir", "whole") == 0
    ran(hill)
    (hill / "stop.txt").write_text("25")
    assert killed(lambda: raypipe("run", "hill.yaml", "--run-dir", "killed"))
    assert raypipe("run", "hill.yaml", "--run-dir", "killed") == 0
    whole, again = (table(hill / name, "race") for name in ("whole", "killed"))
    assert whole.to_csv() == again.to_csv()


def test_equal_points_stay_and_the_race_is_undecided(hill, capsys):
    code = (hill / "hill.py").read_text().replace("abs(s.layers - 3) + ", "")
    (hill / "hill.py").write_text(code)
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    output = capsys.readouterr().out
    assert "undecided between 3 points with 12 seeds" in output
    assert "more" in output or "no difference in sight" in output
    race = table(hill / "run", "race")
    assert set(race["status"]) == {"contender"}
    more = ("--matrix", "race.most_runs=13")
    ran(hill)
    assert raypipe("run", "hill.yaml", *more, "--run-dir", "run") == 0
    assert ran(hill) == {"fit": 3, "judge": 3}


def test_a_point_that_fails_is_out_of_the_race(hill, capsys):
    more = ("--matrix", "fit.layers=[2,3,13]")
    assert raypipe("run", "hill.yaml", *more, "--run-dir", "run") == 1
    race = table(hill / "run", "race")
    failed = race[race["status"] == "failed"]
    assert list(failed["point"]) == [json.dumps({"fit.layers": 13})]
    assert "winner" in set(race["status"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fit.layers=[2]", "the matrix has 1 point; a race needs two or more"),
        ("runs=3", "race: decides the number of seeds itself; leave out runs"),
        ("race.most_runs=5", "with fewer than 6 seeds no test can reach alpha = 0.05"),
        ("race.first_runs=13", "first_runs = 13: exceeds most_runs = 12"),
        ("race.metric=measures.valu", "did you mean value"),
        ("race.metric=measures.size", "does not say which size is better"),
        ("race.where={kind: a}", "where = kind: is not a column of measures"),
        ("race.alpha=0", "matrix.race.alpha = 0"),
        ("seed=[0,1]", "race: the axis `seed` is also given"),
        ("fit.seed=[0,1]", "race: the axis `fit.seed` is also given"),
    ],
)
def test_an_impossible_race_is_one_message(hill, capsys, text, message):
    for command in ("run", "plan"):
        assert raypipe(command, "hill.yaml", "--matrix", text) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (hill / "runs").exists()


def test_the_plan_says_what_a_race_does_at_most(hill, capsys):
    assert raypipe("plan", "hill.yaml") == 0
    output = capsys.readouterr().out
    assert "race: 3 points, 7 to 12 seeds each" in output
    assert "36" in output


# the decisions alone


def settings_of(**given: object) -> RaceSettings:
    return RaceSettings.model_validate({"metric": "measures.value", **given})


def raced(values: dict[int, list[float]], mode: str = "min", **given: object) -> Standing:
    """Return the state of a race over values by point and seed, when it asks for nothing more."""
    section = settings_of(**given)
    results: dict[Run, float | None] = {}
    names = [str(place) for place in values]
    while (state := standing(names, results, section, mode)).due:
        results |= {(place, run): values[place][run] for place, run in state.due}
    return state


def final(state: Standing) -> dict[int, str]:
    """Return the last status of each point."""
    return {row["place"]: row["status"] for row in state.rows}


def test_a_clearly_worse_point_goes_in_the_first_round_in_which_a_test_can_tell():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, (3, 20))
    state = raced({0: list(noise[0]), 1: list(noise[1]), 2: list(5 + noise[2])})
    gone = [row for row in state.rows if row["status"] == "dropped" and row["place"] == 2]
    assert [row["runs"] for row in gone] == [runs_needed(2)]
    state = raced({0: list(-noise[0]), 1: list(-5 - noise[1])}, mode="max")
    assert final(state) == {0: "winner", 1: "dropped"}
    assert state.rows[-1]["runs"] == runs_needed(1)


def test_a_race_asks_for_seeds_of_contenders_only():
    worse = [9.0 + run for run in range(20)]
    values = {0: [float(run % 3) for run in range(20)], 1: [float(run % 2) for run in range(20)]}
    section = settings_of(most_runs=12)
    results: dict[Run, float | None] = {}
    asked: list[Run] = []
    while (state := standing(["a", "b", "c"], results, section, "min")).due:
        asked += state.due
        results |= {(p, r): {**values, 2: worse}[p][r] for p, r in state.due}
    assert len(asked) == len(set(asked))
    assert sum(place == 2 for place, _ in asked) == first_runs(section, 3)
    assert sum(place == 0 for place, _ in asked) == 12


runs = st.lists(st.floats(-10, 10), min_size=12, max_size=12)


@settings(max_examples=8, deadline=None)
@given(values=st.lists(runs, min_size=2, max_size=3), first=st.integers(2, 8))
def test_no_winner_is_named_on_too_few_seeds(values, first):
    state = raced(dict(enumerate(values)), first_runs=first, most_runs=12)
    last = final(state)
    assert sum(status == "winner" for status in last.values()) <= 1
    for row in state.rows:
        if row["status"] in ("winner", "dropped"):
            assert row["runs"] >= runs_needed(1)
        if row["status"] == "dropped":
            assert row["p_holm"] <= 0.05
    if "winner" not in last.values():
        assert "undecided" in state.verdict
        assert state.rows[-1]["runs"] == 12


@given(values=runs, count=st.integers(2, 3))
@settings(max_examples=5, deadline=None)
def test_equal_points_are_never_dropped(values, count):
    state = raced(dict.fromkeys(range(count), values), most_runs=12)
    assert set(final(state).values()) == {"contender"}
    assert all(row["runs_needed"] is None for row in state.rows)
    assert "no difference in sight" in state.verdict


def test_a_point_left_over_by_failures_is_no_winner():
    state = raced({0: [1.0] * 20, 1: [math.nan] * 20})
    assert final(state) == {0: "contender", 1: "failed"}
    assert "the other points failed" in state.verdict


def test_elimination_is_friedman_then_wilcoxon_with_holm():
    rng = np.random.default_rng(3)
    table = pd.DataFrame(rng.normal([0, 0.2, 2.0], 1, (12, 3)), columns=list("abc"))
    found = eliminate(table, 0.05)
    assert found["p_friedman"] == pytest.approx(
        scipy.stats.friedmanchisquare(*table.to_numpy().T).pvalue
    )
    best, others = found["best"], sorted(found["p_holm"])
    raw = {name: scipy.stats.wilcoxon(table[name], table[best]).pvalue for name in others}
    small, large = sorted(others, key=raw.__getitem__)
    assert found["p_holm"][small] == pytest.approx(min(1, 2 * raw[small]))
    assert found["p_holm"][large] == pytest.approx(min(1, max(2 * raw[small], raw[large])))
    assert found["worse"] == ["c"]


@pytest.mark.parametrize("shift", [0.5, 0.8])
def test_the_seeds_needed_give_the_stated_power(shift):
    """The simulated power at the returned number is near 80 %, above it for few seeds."""
    rng = np.random.default_rng(1)
    needed = int(runs_for_power(rng.normal(shift, 1, 2000)))
    draws = rng.normal(shift, 1, (400, needed))
    found = np.mean([scipy.stats.wilcoxon(row).pvalue <= 0.05 for row in draws])
    assert 0.72 <= found <= 0.95


def test_more_comparisons_and_smaller_differences_need_more_seeds():
    rng = np.random.default_rng(2)
    noise = rng.normal(0, 1, 30)
    assert runs_for_power(0.5 + noise) < runs_for_power(0.3 + noise)
    assert runs_for_power(0.5 + noise) < runs_for_power(0.5 + noise, comparisons=5)
    assert math.isinf(runs_for_power([1.0, -1.0, 0.0]))
    assert runs_for_power([1.0, 2.0, 3.0]) >= runs_needed(1)
