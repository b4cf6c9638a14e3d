"""Search and race by what a training adds to the table ``trials``, without a declaration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests import command

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
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(12, 2, generator=draw)
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
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    Path("searched_task.py").write_text(MODULE)
    Path("c.yaml").write_text(CONFIG)
    yield tmp_path
    sys.modules.pop("searched_task", None)


def raypipe(*words: str) -> command.Ended:
    arguments = ("run", "c.yaml", "--local", "--run-dir", "r", *words)
    return command.in_process(InlineLauncher(), *arguments, environment={})


def search(metric: str, *words: str) -> command.Ended:
    search = f"matrix.search={{trials: 3, axes: {{shift: {{low: 0.0, high: 9.0}}}}, {metric}}}"
    return raypipe(search, *words)


@pytest.mark.parametrize(
    ("metric", "words", "mode"),
    [
        ("metrics: [{metric: trials.eval_accuracy}]", (), "max"),
        ("metrics: [{metric: trials.eval_loss}]", (), "min"),
        ("metrics: [{metric: trials.eval_odd, mode: max}]", (), "max"),
        (
            "metrics: [{metric: trials.eval_odd}]",
            ("train.training.monitor={metric: odd, mode: max}", "train.training.eval_every=1"),
            "max",
        ),
    ],
)
def test_a_column_of_the_training_is_searched(metric, words, mode):
    ended = search(metric, *words)
    assert ended.status == 0, ended.output
    run_dir = RunDirectory.at("r")
    found, trials = read_table(run_dir, "search"), read_table(run_dir, "trials")
    name = metric.split("metric: ")[1].split("}")[0].split(",")[0]
    values = trials[name.removeprefix("trials.")]
    assert sorted(found[name]) == pytest.approx(sorted(values))
    best = found.loc[found["on_front"].astype(bool), name]
    assert set(best) == {max(values) if mode == "max" else min(values)}


def test_a_constraint_on_a_column_of_the_training_holds():
    bound = "constraints: [{metric: trials.eval_accuracy, at_least: 2.0}]"
    ended = search(f"metrics: [{{metric: trials.eval_loss}}], {bound}")
    assert ended.status == 0, ended.output
    assert not read_table(RunDirectory.at("r"), "search")["feasible"].any()


@pytest.mark.parametrize(
    ("metric", "status", "message"),
    [
        (
            "metrics: [{metric: trials.eval_acuracy}]",
            1,
            "no row of the table has it; did you mean eval_accuracy? (numbers: ",
        ),
        ("metrics: [{metric: trials.los_final}]", 2, "did you mean loss_final"),
        ("metrics: [{metric: trials.device}]", 2, "device holds no numbers"),
        ("metrics: [{metric: trials.eval_odd}]", 2, "does not say which eval_odd is better"),
    ],
)
def test_a_column_that_does_not_exist_is_named(metric, status, message):
    ended = search(metric.replace("eval_acuracy}", "eval_acuracy, mode: max}"))
    assert ended.status == status, ended.output
    assert message in ended.output
    assert Path("r").exists() == (status == 1)


def test_a_column_of_the_training_is_raced():
    Path("c.yaml").write_text(CONFIG.replace("matrix: {}", "matrix: {shift: [0.0, 9.0]}"))
    ended = raypipe("matrix.race={metric: trials.eval_accuracy, most_runs: 6}")
    assert ended.status == 0, ended.output
    rows = read_table(RunDirectory.at("r"), "race")
    assert len(rows)
