"""Races of a matrix: seeds until the statistics decide, and no winner before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.config.matrix import RaceSettings
from raypipe.stats import holm, runs_needed
from raypipe.study.race import Run, Standing, eliminate, standing
from tests.command import raypipe
from tests.raypipe.examples.hills import edit, killed, ran, run, table

RACE = """
experiment: hill
matrix:
  fit.layers: [2, 3, 6]
  race: {metric: measures.value, where: {method: judge}, most_runs: 12}
"""


def test_a_race_drops_what_is_worse_and_names_the_winner(hill):
    (hill / "hill.yaml").write_text(RACE)
    noise = '__import__("random").Random(f"{s.seed} {s.layers}").gauss(0, 0.2)'
    edit("abs(s.layers - 3)", f"abs(s.layers - 3) + {noise}")
    assert "race: 3 points, 7 to 12 seeds each" in raypipe("plan", "hill.yaml")
    output = run()
    assert "race: fit.layers=6 dropped" in output
    assert "fit.layers=3 wins with 7 seeds" in output
    race = table("race")
    last = race[race["round"] == race["round"].max()].set_index("point")["status"]
    assert last[json.dumps({"fit.layers": 3})] == "winner"
    assert race["runs"].min() == runs_needed(2)
    assert ran() == {"prepare": 1, "fit": 21, "judge": 21}
    means = table("measures").query("method == 'judge'").groupby("variant")["value"]
    assert means.count().eq(1).all()
    assert len(table("variant_tests"))
    assert "nothing to do" in run()
    Path("stop.txt").write_text("25")
    assert killed(lambda: run(folder="killed"))
    run(folder="killed")
    assert race.to_csv() == table("race", "killed").to_csv()


# the decisions alone


def raced(values: dict[int, list[float]], mode: str = "min", **given: object) -> Standing:
    """Return the state of a race over values by point and seed, when it asks for nothing more."""
    section = RaceSettings.model_validate({"metric": "measures.value", **given})
    results: dict[Run, float | None] = {}
    names = [str(place) for place in values]
    while (state := standing(names, results, section, mode)).due:
        results |= {(place, run): values[place][run] for place, run in state.due}
    return state


def test_a_clearly_worse_point_goes_in_the_first_round_in_which_a_test_can_tell():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, (3, 20))
    state = raced({0: list(noise[0]), 1: list(noise[1]), 2: list(5 + noise[2])})
    gone = [(row["place"], row["runs"]) for row in state.rows if row["status"] == "dropped"]
    assert gone[:1] == [(2, runs_needed(2))]
    state = raced({0: list(-noise[0]), 1: list(-5 - noise[1])}, mode="max")
    assert [row["status"] for row in state.rows] == ["winner", "dropped"]
    assert state.rows[-1]["runs"] == runs_needed(1)


runs = st.lists(st.floats(-10, 10), min_size=9, max_size=9)


@settings(max_examples=8, deadline=None)
@given(values=st.lists(runs, min_size=2, max_size=3))
def test_no_winner_is_named_on_too_few_seeds(values):
    state = raced(dict(enumerate(values)), most_runs=9)
    last = {row["place"]: row["status"] for row in state.rows}
    assert sum(status == "winner" for status in last.values()) <= 1
    for row in state.rows:
        if row["status"] in ("winner", "dropped"):
            assert row["runs"] >= runs_needed(1)
        if row["status"] == "dropped":
            assert row["p_holm"] <= 0.05
    if "winner" not in last.values():
        assert "undecided" in state.verdict
        assert state.rows[-1]["runs"] == 9


def test_elimination_is_friedman_then_wilcoxon_with_holm():
    rng = np.random.default_rng(3)
    table = pd.DataFrame(rng.normal([0, 0.2, 2.0], 1, (12, 3)), columns=list("abc"))
    best, p_friedman, pairs = eliminate(table, 0.05)
    assert p_friedman == pytest.approx(scipy.stats.friedmanchisquare(*table.to_numpy().T).pvalue)
    raw = [scipy.stats.wilcoxon(table[name], table[best]).pvalue for name in pairs.index]
    assert list(pairs["p_holm"]) == pytest.approx(holm(raw))
    assert list(pairs.index[pairs["is_worse"]]) == ["c"]
