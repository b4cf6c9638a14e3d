"""The benchmark of duels, and the tables of its results."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks import duels
from docs import duel_tables
from experiments.pabbo_lda.pabbo.evaluation import EvaluationSettings, Searches
from experiments.pabbo_lda.pabbo.model import SMALL, PabboModel
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import write_weights


def test_no_setting_is_chosen_on_the_functions_of_the_results() -> None:
    assert duels.HELD_OUT.functions >= 200
    assert duels.HELD_OUT.seed != duels.VALIDATION.seed
    assert duels.HELD_OUT.steps == duels.VALIDATION.steps


def test_each_method_is_tested_against_both_controls() -> None:
    torch.manual_seed(0)
    better = torch.rand(40, 2, 4).sort(dim=2, descending=True).values
    searches = Searches(
        {"random": better + 0.1, "gp_improvement": better, "small_best": better + 0.2},
        torch.arange(80).view(40, 2) % 3 == 0,
        torch.ones(40),
    )
    rows = {(row["start"], row["method"]): row for row in duels.measured(searches)}
    assert len(rows) == 3 * 3
    tests = rows["all", "small_best"]["against"]
    assert tests["random"]["regret"]["difference"] == pytest.approx(0.1)
    assert tests["random"]["regret"]["conclusion"] == "random is lower"
    assert tests["gp_improvement"]["area"]["difference"] == pytest.approx(0.2)
    assert rows["far", "gp_improvement"]["against"]["random"]["area"]["difference"] < 0
    assert "gp_improvement" not in rows["all", "gp_improvement"]["against"]
    assert "random is lower" not in json.dumps(rows["all", "gp_improvement"])


@pytest.mark.skipif(find_spec("botorch") is None, reason="BoTorch is missing")
def test_searches_are_stored_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    run, metadata = RunDirectory.at(tmp_path / "run"), {"model": SMALL.model_dump_json()}
    write_weights(run, run.model("m"), PabboModel(SMALL).state_dict(), metadata)
    (tmp_path / "m.safetensors").write_bytes(run.read(run.model("m")))
    few = EvaluationSettings(functions=6, starts=2, steps=3, query_points=20, candidate_pairs=40)
    monkeypatch.setattr(duels, "HELD_OUT", few)
    monkeypatch.setattr(duels, "RESULTS", tmp_path)
    monkeypatch.setattr(duel_tables, "_RESULTS", tmp_path)
    duels.search([f"small={tmp_path / 'm.safetensors'}"])
    first = (tmp_path / "measures.json").read_bytes()
    stored = pd.read_parquet(tmp_path / "searches-gp_improvement.parquet")
    assert (len(stored), len(stored["regret"][0])) == (6 * 2, 4)
    duels.search([f"small={tmp_path / 'm.safetensors'}"])  # the process is not run again
    repeated = json.loads((tmp_path / "measures.json").read_bytes())
    for row, known in zip(repeated["rows"], json.loads(first)["rows"], strict=True):
        assert row | {"cpu_s": 0} == known | {"cpu_s": 0}
    text = "\n".join([*duel_tables.search_lines(), *duel_tables.start_lines()])
    assert text.count("| PABBO small, drawn |") == 3 + 2
    assert "| PABBO large" not in text


def test_a_table_says_which_one_the_test_calls_lower() -> None:
    known = duel_tables._difference(-0.01, 0.02, 0.001, "small_best is lower", "small_best")
    assert known == "-0.0100 ± 0.0200, lower, p = 0.001"
    other = duel_tables._difference(-0.01, 0.02, 0.001, "random is lower", "small_best")
    assert "higher" in other
    assert "level" in duel_tables._difference(0, 1, 0.5, "no difference found", "small_best")
