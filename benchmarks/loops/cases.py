"""Cases: the model, samples and settings that all contenders share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from experiments.lm_pretrain.model import medium, tiny
from experiments.lm_pretrain.training import LanguageModelTask, RandomTokens
from raypipe.hardware import Precision
from raypipe.training.schedule import Phase, learning_rate
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import StepContext, TrainTask

LOG_EVERY = 10
CLIP_NORM = 1.0
_WARMUP_STEPS = 10


@dataclass(frozen=True)
class Case:
    """Training run of ``steps`` steps; a sample counts as ``units`` of ``unit``, such as tokens."""

    name: str
    task: TrainTask
    micro_batch: int
    accumulation: int
    steps: int
    training: TrainingSettings
    loader_workers: int
    unit: str
    units: int

    @property
    def effective_batch(self) -> int:
        """Samples per step."""
        return self.micro_batch * self.accumulation

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: warm-up, then cosine."""
        phase = Phase("train", self.steps, self.effective_batch, self.training.learning_rate)
        return learning_rate(self.training, phase, step)

    def model(self, device: torch.device) -> MeanLoss:
        """Return the model with the initial weights of every contender."""
        torch.manual_seed(self.training.seed)
        return MeanLoss(self.task.build_model().to(device), self.task)

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """Return fused AdamW with the settings of the case."""
        t = self.training
        return torch.optim.AdamW(
            model.parameters(), t.learning_rate, t.betas, weight_decay=t.weight_decay, fused=True
        )

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Return the learning rates as a scheduler that is stepped after each optimizer step."""
        peak = self.training.learning_rate
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.rate(min(step, self.steps - 1)) / peak
        )

    def loader_settings(self, device: torch.device) -> dict[str, Any]:
        """Return loader processes, prefetching and page-locked memory, by DataLoader's names."""
        processes = self.loader_workers
        return {
            "num_workers": processes,
            "prefetch_factor": 2 if processes else None,
            "persistent_workers": processes > 0,
            "pin_memory": device.type == "cuda",
        }

    def loader(self, device: torch.device) -> DataLoader[Any]:
        """Return the micro-batches in the order of the samples."""
        return DataLoader(
            self.task.build_dataset(), self.micro_batch, **self.loader_settings(device)
        )


class MeanLoss(nn.Module):
    """Model and loss in one module, so that compiling it includes the loss.

    All micro-batches have the same size, so the mean of their means is the mean over all tokens.
    """

    def __init__(self, model: nn.Module, task: TrainTask) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._context = StepContext(0, Phase("train", 1, 1, 1.0), 0)

    def forward(self, batch: Any) -> Tensor:
        """Return the mean loss of a micro-batch, a scalar."""
        loss = self._task.loss(self.model, batch, self._context)
        return loss.total / loss.weight


def make(name: str, steps: int, device: torch.device, loader_workers: int) -> Case:
    """Return a case by name, without dropout, so that all contenders have the same losses.

    Raises:
        ValueError: the name is unknown.

    """
    precision: Precision = "bf16" if device.type == "cuda" else "fp32"
    if name == "lm-tiny":
        settings, micro_batch, accumulation = tiny(), 4, 1
        training = _training(steps)
    elif name == "lm-medium":
        settings, micro_batch, accumulation = medium().model_copy(update={"dropout": 0.0}), 16, 8
        training = _training(steps, precision=precision, compiled=True)
    else:
        raise ValueError(f"{name}: there are lm-tiny and lm-medium")
    data = RandomTokens(settings.vocabulary, settings.context, steps * micro_batch * accumulation)
    task = LanguageModelTask(settings, data)
    task.shuffle = False
    return Case(
        name, task, micro_batch, accumulation, steps, training, loader_workers,
        "tokens", settings.context,
    )  # fmt: skip


def _training(
    steps: int, precision: Precision = "fp32", compiled: bool = False
) -> TrainingSettings:
    return TrainingSettings(
        steps=steps, precision=precision, compile=compiled, clip_norm=CLIP_NORM, learning_rate=3e-4,
        optimizer="adamw", betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=_WARMUP_STEPS,
        schedule="cosine", log_every=LOG_EVERY, checkpoint_every=steps, keep_state=False,
    )  # fmt: skip
