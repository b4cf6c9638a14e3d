"""Mistakes of a task that a training finds in its first step."""

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

def data():
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 2, generator=draw), torch.ones(16, 1))

class Task(TrainTask):
    def __init__(self, loss):
        self.kind = loss
    def build_model(self):
        return nn.Linear(2, 1)
    def build_dataset(self):
        return data()
    def loss(self, model, batch, context):
        x, y = batch
        error = (model(x) - y).square()
        if self.kind == "mean":
            return Loss(error.mean(), len(x))
        if self.kind == "given":
            return Loss.mean(error.mean(), len(x), {"small": (error < 1).float().mean()})
        return Loss(error.sum(), len(x), {"small": (error < 1).sum()})

class Own(Settings):
    loss: str = "sum"
    train: TrainStageSettings = TrainStageSettings()

def stages(s):
    return [train_stage("train", s.train, lambda s, run_dir: Task(s.loss))]

EXPERIMENT = Experiment("tasks", 1, Own, stages)
"""
CONFIG = """
experiment: first_tasks
train: {training: {steps: 3, effective_batch: 8, micro_batch: 3, log_every: 1}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("first_tasks.py").write_text(MODULE)
    Path("c.yaml").write_text(CONFIG)
    yield tmp_path
    sys.modules.pop("first_tasks", None)


def raypipe(*words: str, launcher: InlineLauncher | None = None) -> command.Ended:
    return command.in_process(launcher, "run", "c.yaml", *words, environment={})


def test_a_mean_is_refused_with_the_line_of_the_task():
    ended = raypipe("loss=mean", "--run-dir", "r", launcher=InlineLauncher())
    assert ended.status == 1
    assert "Task.loss: Loss.total is a mean" in ended.output
    assert "Loss.mean(mean, weight)" in ended.output
    number = next(n for n, text in enumerate(MODULE.splitlines(), 1) if "def loss" in text)
    assert f"first_tasks.py:{number}" in ended.output


def test_a_mean_that_says_so_trains_as_the_sum():
    for kind in ("sum", "given"):
        ended = raypipe(f"loss={kind}", "--run-dir", kind, launcher=InlineLauncher())
        assert ended.status == 0, ended.output
    columns = ["step", "loss", "small"]
    found = [read_table(RunDirectory.at(kind), "steps")[columns] for kind in ("sum", "given")]
    assert found[0].round(5).equals(found[1].round(5))
