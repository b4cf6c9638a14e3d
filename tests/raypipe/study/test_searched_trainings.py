"""Search and race by what a training adds to the table ``trials``, without a declaration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import raypipe
from tests.raypipe.examples.hills import table

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from raypipe import Experiment, Loss, Settings, TrainStageSettings, TrainTask, train_stage

class Task(TrainTask):
    def __init__(self, shift):
        self.shift = shift
    def build_model(self):
        return nn.Linear(2, 1)
    def build_dataset(self):
        x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x[:, :1] + self.shift)
    def build_eval_dataset(self):
        return self.build_dataset()
    def loss(self, model, batch, context):
        x, y = batch
        error = (model(x) - y).square()
        return Loss(error.sum(), len(x), {"accuracy": (error < 1).sum(), "odd": error.abs().sum()})

class Own(Settings):
    shift: float = 0.0
    seed: int = 0
    train: TrainStageSettings = TrainStageSettings()

def stages(s):
    return [train_stage("train", s.train, lambda s, run_dir: Task(s.shift))]

EXPERIMENT = Experiment("searched", 1, Own, stages)
"""
CONFIG = """
experiment: searched_task
train: {training: {steps: 2, effective_batch: 6, micro_batch: 6}}
matrix: {}
"""


@pytest.fixture(autouse=True)
def _searched(folder: Path) -> None:
    Path("searched_task.py").write_text(MODULE)
    Path("c.yaml").write_text(CONFIG)


def run(*words: str, expected: int = 0) -> str:
    return raypipe("run", "c.yaml", "--local", "--run-dir", "run", *words, expected=expected)


def search(metric: str, *words: str, expected: int = 0) -> str:
    axes = "{shift: {low: 0.0, high: 9.0}}"
    return run(f"matrix.search={{trials: 3, axes: {axes}, {metric}}}", *words, expected=expected)


ODD = ("train.training.monitor={metric: odd, mode: max}", "train.training.eval_every=1")


@pytest.mark.parametrize(
    ("column", "given", "words", "mode"),
    [
        ("eval_accuracy", "", (), "max"),
        ("eval_loss", "", (), "min"),
        ("eval_odd", ", mode: max", (), "max"),
        ("eval_odd", "", ODD, "max"),
    ],
)
def test_a_column_of_the_training_is_searched(column, given, words, mode):
    search(f"metrics: [{{metric: trials.{column}{given}}}]", *words)
    found, values = table("search"), table("trials")[column]
    assert sorted(found[f"trials.{column}"]) == pytest.approx(sorted(values))
    best = found.loc[found["on_front"].astype(bool), f"trials.{column}"]
    assert set(best) == {max(values) if mode == "max" else min(values)}


@pytest.mark.parametrize(
    ("metric", "status", "message"),
    [
        (
            "eval_acuracy, mode: max",
            1,
            "no row of the table has it; did you mean eval_accuracy? (numbers: ",
        ),
        ("los_final", 2, "did you mean loss_final"),
    ],
)
def test_a_column_that_does_not_exist_is_named(metric, status, message):
    assert message in search(f"metrics: [{{metric: trials.{metric}}}]", expected=status)
    assert Path("run").exists() == (status == 1)


def test_a_column_of_the_training_is_raced():
    Path("c.yaml").write_text(CONFIG.replace("matrix: {}", "matrix: {shift: [0.0, 9.0]}"))
    run("matrix.race={metric: trials.eval_accuracy, most_runs: 6}")
    assert len(table("race"))
