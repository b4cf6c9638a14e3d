"""Training: the model, the data that ``prepare`` stored, and the loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from augmented.prepare import TRAINED_ON, digits, stored
from raypipe import Loss, TrainTask

#: digits that the training is evaluated on; the last ones are for the stage ``evaluate`` alone
TUNED_ON = slice(TRAINED_ON, 1500)


def build_model(width):
    """Return the classifier with initial weights."""
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))


class AugmentedTask(TrainTask):
    """The training problem; it is pickled, so it holds settings and no data."""

    def __init__(self, width, run_dir):
        self.width, self.run_dir = width, run_dir

    def build_model(self):
        """Return the model."""
        return build_model(self.width)

    def build_dataset(self):
        """Return the prepared images."""
        pixels, shown = stored(self.run_dir)
        return TensorDataset(torch.from_numpy(pixels), torch.tensor(shown))

    def build_eval_dataset(self):
        """Return images that were neither trained on nor are part of the evaluation."""
        images, shown = digits(TUNED_ON.start, TUNED_ON.stop)
        pixels = torch.tensor(images.reshape(-1, 64), dtype=torch.float32)
        return TensorDataset(pixels, torch.tensor(shown))

    def loss(self, model, batch, context):
        """Return sums over the samples of a micro-batch, not means."""
        pixels, shown = batch
        outputs = model(pixels).float()
        total = F.cross_entropy(outputs, shown, reduction="sum")
        return Loss(total, len(shown), {"accuracy": (outputs.argmax(1) == shown).sum()})


def build_task(settings, run_dir):
    """Return the task of the stage ``train``."""
    return AugmentedTask(settings.model.width, run_dir)
