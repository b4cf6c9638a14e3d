"""Runs of a function are compared by the means of each setting over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from raypipe.commands.compare import compare
from raypipe.functions.experiment import FunctionSettings, function_experiment
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Column, Table, write_table


def _run(folder: Path, seeds: Sequence[int], maximize: Sequence[str] = ("score",)) -> RunDirectory:
    """A run with scores that are 10 times C plus gamma, plus the seed over 10."""
    run = RunDirectory.at(folder)
    arguments = {"C": [1, 2], "gamma": [0.5, 0.1], "kind": "a", "seed": list(seeds)}
    settings = FunctionSettings(arguments=arguments, maximize=tuple(maximize))
    (table,) = function_experiment("m:f", None, settings).tables
    rows = [
        {"call": f"C={C},gamma={gamma},seed={seed}", "C": C, "gamma": gamma, "kind": "a",
         "seed": seed, "score": 10 * C + gamma + seed / 10, "duration_s": 1.0, "worker": "w",
         "attempt": 1}
        for C in (1, 2) for gamma in (0.5, 0.1) for seed in seeds
    ]  # fmt: skip
    write_table(run, table, rows, "r")
    return run


def test_settings_are_compared_by_their_means_over_seeds(tmp_path: Path) -> None:
    found = compare([_run(tmp_path / "one", range(5)), _run(tmp_path / "two", range(5, 8))])
    rows = {each.row: each for each in found.results}
    assert list(rows) == ["C=1, gamma=0.5", "C=1, gamma=0.1", "C=2, gamma=0.5", "C=2, gamma=0.1"]
    best = rows["C=2, gamma=0.5"]
    assert best.values == (pytest.approx(20.7), pytest.approx(21.1))
    shown = found.text(None)
    assert "21.1 (+0.4, better)" in shown
    assert "20.7 (C=2, gamma=0.5, mean of 5)" in shown
    assert "21.1 (C=2, gamma=0.5, mean of 3)" in shown
    assert [each and each["points"] for each in found.best["calls.score"]] == ["C=2, gamma=0.5"] * 2


def test_groups_are_not_averaged(tmp_path: Path) -> None:
    table = Table("scores", "a score", (Column("score", "real", "It.", better="higher"),),
                  axes=("method",), groups=("corpus",))  # fmt: skip
    runs = [RunDirectory.at(tmp_path / name) for name in "ab"]
    for run in runs:
        rows = [{"method": "m", "corpus": corpus, "seed": seed, "score": score}
                for corpus, score in (("x", 1.0), ("y", 9.0)) for seed in range(2)]  # fmt: skip
        write_table(run, table, rows, "r")
    found = {each.row: each.values for each in compare(runs).results}
    assert found == {"x": (1.0, 1.0), "y": (9.0, 9.0)}


def test_the_same_calls_in_another_order_are_the_same(tmp_path: Path) -> None:
    shown = compare([_run(tmp_path / "a", [0, 1, 2]), _run(tmp_path / "b", [2, 0, 1])]).text(None)
    assert "results: no difference" in shown
    assert "4 results are the same" in shown


def test_without_a_direction_numbers_are_compared_but_not_the_arguments(tmp_path: Path) -> None:
    runs = [_run(tmp_path / name, seeds, ()) for name, seeds in (("a", range(80)), ("b", range(2)))]
    found = compare(runs)
    assert {each.column for each in found.results} == {"score"}
    assert len(found.results) == 4
    assert found.best == {}
