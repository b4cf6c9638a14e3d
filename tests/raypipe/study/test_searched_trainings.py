"""Search and race by what a training adds to the table ``trials``, without a declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.graph.experiment import Experiment
from raypipe.graph.training_stage import train_stage
from raypipe.training.task import Loss, StepContext
from tests.command import raypipe
from tests.raypipe.examples.example_sweep import Line, SweptSettings
from tests.raypipe.examples.hills import table

CONFIG = f"""
experiment: {__name__}
train: {{training: {{steps: 2, effective_batch: 6, micro_batch: 6}}}}
"""
ODD = ("train.training.monitor={metric: odd, mode: max}", "train.training.eval_every=1")

pytestmark = pytest.mark.usefixtures("folder")


class Task(Line):
    """A line with metrics that the experiment does not declare."""

    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        found = super().loss(model, batch, context)
        error = found.total.detach()
        return found._replace(metrics={"accuracy": -error, "odd": error.sqrt()})


EXPERIMENT = Experiment(
    "searched",
    1,
    SweptSettings,
    lambda s: [train_stage("train", s.train, lambda s, _: Task(s.width, s.fail))],
)


def run(matrix: str, *words: str, expected: int = 0) -> str:
    Path("c.yaml").write_text(f"{CONFIG}matrix: {{{matrix}}}\n")
    return raypipe("run", "c.yaml", "--local", "--run-dir", "run", *words, expected=expected)


def search(metric: str, *words: str, expected: int = 0) -> str:
    axes = "{train.training.learning_rate: {low: 0.01, high: 0.1}}"
    sought = f"{{trials: 3, axes: {axes}, metrics: [{{metric: {metric}}}]}}"
    return run(f"search: {sought}", *words, expected=expected)


@pytest.mark.parametrize(("column", "words"), [("eval_loss", ()), ("eval_odd", ODD)])
def test_a_column_of_the_training_is_searched(column, words):
    search(f"trials.{column}", *words)
    found, values = table("search"), table("trials")[column]
    assert sorted(found[f"trials.{column}"]) == pytest.approx(sorted(values))
    best = found.loc[found["on_front"].astype(bool), f"trials.{column}"]
    assert set(best) == {max(values) if words else min(values)}


@pytest.mark.parametrize(
    ("metric", "status", "message"),
    [
        ("eval_acuracy, mode: max", 1, "has it; did you mean eval_accuracy? (numbers: "),
        ("los_final", 2, "did you mean loss_final"),
    ],
)
def test_a_column_that_does_not_exist_is_named(metric, status, message):
    assert message in search(f"trials.{metric}", expected=status)
    assert Path("run").exists() == (status == 1)


def test_a_column_of_the_training_is_raced():
    run("width: [2, 8], race: {metric: trials.eval_accuracy, most_runs: 6}")
    assert len(table("race"))
