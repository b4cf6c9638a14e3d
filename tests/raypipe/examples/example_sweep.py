"""An experiment with one training stage, small enough to be swept in a test."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import raypipe as rp

#: an environment variable: the micro-batch whose trials last until a test has ended them
HELD = "EXAMPLE_SWEEP_HELD"


class Line(rp.TrainTask):
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

    def loss(self, model: Any, batch: Any, context: rp.StepContext) -> rp.Loss:
        x, y = batch
        if os.environ.get(HELD) == str(len(x)):
            time.sleep(0.5)
        return rp.Loss((model(x).float().squeeze(1) - y).square().sum(), len(x))


class SweptSettings(rp.Settings):
    width: int = 4
    fail: bool = False
    train: rp.TrainStageSettings = rp.TrainStageSettings()


def stages(settings: SweptSettings) -> Sequence[rp.Stage]:
    return [rp.train_stage("train", settings.train, lambda s, _: Line(s.width, s.fail))]


METRICS = (rp.Column("eval_loss", "real", "Mean loss on the held-out points."),)
EXPERIMENT = rp.Experiment("swept", 1, SweptSettings, stages, step_metrics=METRICS)
