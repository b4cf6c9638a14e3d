"""Search and race by what a training adds to the table ``trials``, without a declaration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import example_sweep
import pytest

from raypipe.training.task import Loss, StepContext
from tests.command import raypipe
from tests.raypipe.examples.hills import table

CONFIG = """
experiment: example_sweep
train: {training: {steps: 2, effective_batch: 6, micro_batch: 6}}
"""
#: a search for a column of trainings
SEARCH = "search: {trials: 3, axes: {train.training.learning_rate: {low: 0.01, high: 0.1}}, "
SEARCH += "metrics: [{metric: trials.%s}]}"
ODD = ("train.training.monitor={metric: odd, mode: max}", "train.training.eval_every=1")


@pytest.fixture(autouse=True)
def _task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undeclared = replace(example_sweep.EXPERIMENT, step_metrics=())
    monkeypatch.setattr(example_sweep, "EXPERIMENT", undeclared)
    monkeypatch.setattr(example_sweep, "Line", Task)


class Task(example_sweep.Line):
    """A line with metrics that the experiment does not declare."""

    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        found = super().loss(model, batch, context)
        error = found.total.detach()
        return found._replace(metrics={"accuracy": -error, "odd": error.sqrt()})


def run(matrix: str, *words: str, expected: int = 0) -> str:
    Path("c.yaml").write_text(f"{CONFIG}matrix: {{{matrix}}}\n")
    return raypipe("run", "c.yaml", "--local", "--run-dir", "run", *words, expected=expected)


@pytest.mark.parametrize(("column", "words"), [("eval_loss", ()), ("eval_odd", ODD)])
def test_a_column_of_the_training_is_searched(column, words):
    run(SEARCH % column, *words)
    found, values = table("search"), table("trials")[column]
    assert sorted(found[f"trials.{column}"]) == pytest.approx(sorted(values))
    best = found.loc[found["on_front"].astype(bool), f"trials.{column}"]
    assert set(best) == {max(values) if words else min(values)}


def test_a_column_that_no_training_has_is_named():
    shown = run(SEARCH % "eval_acuracy, mode: max", expected=1)
    assert "has it; did you mean eval_accuracy? (numbers: " in shown


def test_a_column_of_the_training_is_raced():
    run("width: [2, 8], race: {metric: trials.eval_accuracy, most_runs: 6}")
    assert len(table("race"))
