"""Classifier of handwritten digits (8 x 8 pixels, ten classes): its model, data and loss."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from raypipe import Experiment, Loss, Settings, TrainStageSettings, TrainTask, train_stage


def images(first, last):
    """Return the digits from the first to before the last."""
    pixels, digits = load_digits(return_X_y=True)
    chosen = torch.tensor(pixels[first:last] / 16, dtype=torch.float32)
    return TensorDataset(chosen, torch.tensor(digits[first:last]))


class Digits(TrainTask):
    """Task of the training; raypipe handles devices, batches, workers and checkpoints."""

    def __init__(self, width):
        self.width = width

    def build_model(self):
        """Return the model with initial weights."""
        return nn.Sequential(nn.Linear(64, self.width), nn.GELU(), nn.Linear(self.width, 10))

    def build_dataset(self):
        """Return the training samples."""
        return images(0, 1500)

    def build_eval_dataset(self):
        """Return the held-out samples, whose loss and accuracy are logged as ``eval_...``."""
        return images(1500, 1797)

    def loss(self, model, batch, context):
        """Return the loss and the metrics of a micro-batch: sums over its samples, not means."""
        pixels, digits = batch
        outputs = model(pixels).float()
        total = F.cross_entropy(outputs, digits, reduction="sum")
        return Loss(total, len(digits), {"accuracy": (outputs.argmax(1) == digits).sum()})


class DigitsSettings(Settings):
    """The keys of the configuration."""

    width: int = 128
    train: TrainStageSettings = TrainStageSettings()


def build_task(settings, run_dir):
    """Return the task of the stage ``train``."""
    return Digits(settings.width)


def stages(settings):
    """Return the stages: one training."""
    return [train_stage("train", settings.train, build_task)]


EXPERIMENT = Experiment("digits", 1, DigitsSettings, stages)
