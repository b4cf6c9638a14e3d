"""Mistakes of a task that a command finds before anything starts."""

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
from torch.utils.data import IterableDataset, TensorDataset
from raypipe import Experiment, Loss, Settings, TrainStageSettings, TrainTask, train_stage

class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())

def data():
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 2, generator=draw), torch.ones(16, 1))

class Task(TrainTask):
    def __init__(self, loss, stream):
        self.kind, self.stream = loss, stream
    def build_model(self):
        return nn.Linear(2, 1)
    def build_dataset(self):
        if self.stream == "broken":
            raise OSError("no such disk")
        return Stream() if self.stream == "endless" else data()
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
    stream: str = "no"
    train: TrainStageSettings = TrainStageSettings()

def stages(s):
    return [train_stage("train", s.train, lambda s, run_dir: Task(s.loss, s.stream))]

EXPERIMENT = Experiment("tasks", 1, Own, stages)
"""
CONFIG = """
experiment: first_tasks
train: {training: {steps: 3, effective_batch: 8, micro_batch: 3, log_every: 1}}
"""
EPOCHS = ("train.training.steps=null", "train.training.epochs=1")


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


@pytest.mark.parametrize(
    ("words", "message", "line"),
    [
        (("loss=mean",), "c.yaml: train: Task.loss: Loss.total is a mean", "def loss"),
        (("loss=mean", "stream=endless"), "Loss.total is a mean", "def loss"),
        (("loss=mean", "matrix.train.training.seed=[1,2]"), "Loss.total is a mean", "def loss"),
        (("stream=endless", *EPOCHS), "c.yaml: train.training.epochs: the dataset is a stream", ""),
    ],
)
def test_it_is_refused_before_ray_starts_in_one_message(words, message, line):
    ended = raypipe(*words, "--run-dir", "r")  # without anything that could run it
    assert ended.status == 2, ended.output
    assert ended.output.count(message) == 1
    assert not Path("r").exists()
    if line:
        number = next(n for n, text in enumerate(MODULE.splitlines(), 1) if line in text)
        assert f"first_tasks.py:{number} in loss" in ended.output
        assert "Loss.mean(mean, weight)" in ended.output
    else:
        assert "give train.training.steps instead" in ended.output


def test_a_task_that_cannot_be_built_here_is_left_to_the_training():
    ended = raypipe("stream=broken", "--run-dir", "r", launcher=InlineLauncher())
    assert ended.status == 1
    assert "OSError: no such disk" in ended.output


def test_a_mean_that_says_so_trains_as_the_sum():
    for kind in ("sum", "given"):
        ended = raypipe(f"loss={kind}", "--run-dir", kind, launcher=InlineLauncher())
        assert ended.status == 0, ended.output
    columns = ["step", "loss", "small"]
    found = [read_table(RunDirectory.at(kind), "steps")[columns] for kind in ("sum", "given")]
    assert found[0].round(5).equals(found[1].round(5))
