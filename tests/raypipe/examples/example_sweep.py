"""An experiment with one training stage, small enough to be swept in a test."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from raypipe.config.settings import Settings
from raypipe.graph.experiment import Experiment, Stage
from raypipe.graph.training_stage import train_stage
from raypipe.store.tables import Column
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import Loss, StepContext, TrainTask

#: an environment variable: the micro-batch whose trials last until a test has ended them
HELD = "EXAMPLE_SWEEP_HELD"


class Line(TrainTask):
    """A line through noisy points."""

    def __init__(self, width: int, fail: bool) -> None:
        self.width, self.fail = width, fail

    def build_model(self) -> nn.Module:
        if self.fail:
            raise ConnectionError("the machine went away")
        return nn.Sequential(nn.Linear(3, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def build_dataset(self) -> Dataset[Any]:
        x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1).sin())

    def build_eval_dataset(self) -> Dataset[Any]:
        return self.build_dataset()

    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        x, y = batch
        if os.environ.get(HELD) == str(len(x)):
            time.sleep(0.5)
        return Loss((model(x).float().squeeze(1) - y).square().sum(), len(x))


class SweptSettings(Settings):
    width: int = 4
    fail: bool = False
    train: TrainStageSettings = TrainStageSettings()


def stages(settings: SweptSettings) -> Sequence[Stage]:
    return [train_stage("train", settings.train, lambda s, _: Line(s.width, s.fail))]


METRICS = (Column("eval_loss", "real", "Mean loss on the held-out points."),)
EXPERIMENT = Experiment("swept", 1, SweptSettings, stages, step_metrics=METRICS)
