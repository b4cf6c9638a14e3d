"""Training of every trial: a small language model, with a clock around its steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from experiments.lm_pretrain.model import LanguageModel, LmSettings
from experiments.lm_pretrain.training import LanguageModelTask, RandomTokens
from raypipe.config.matrix import SEED_STRIDE
from raypipe.config.settings import Operational, Settings
from raypipe.graph.experiment import Experiment, Stage
from raypipe.graph.training_stage import train_stage
from raypipe.store.run_directory import RunDirectory
from raypipe.training.settings import TrainStageSettings

#: learning rate, clip norm and seed of a training
Point = tuple[float, float, int]


@dataclass(frozen=True)
class Study:
    """The trainings that contenders run: a point each, with as many steps and workers."""

    name: str
    points: tuple[Point, ...]
    steps: int
    workers: int = 1
    side_by_side: bool = False
    micro_batch: int = 4
    model: LmSettings = field(default_factory=LmSettings)

    @property
    def effective_batch(self) -> int:
        """Samples per step, over all workers."""
        return self.micro_batch * self.workers


#: function of a study, the folder of its clock and that of its results; it returns the last losses
Contender = Callable[[Study, Path, Path], list[float]]


def sweep_of(trials: int, workers: int, steps: int) -> Study:
    """Return a sweep over seeds, one trial after the other."""
    points = tuple((3e-4, 1.0, seed) for seed in range(trials))
    return Study(f"sweep-{workers}", points, steps, workers)


def matrix_of(steps: int) -> Study:
    """Return a matrix of learning rates, clip norms and seeds, side by side."""
    rates, norms = (1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3), (0.25, 0.5, 1.0, 2.0)
    seeds = [SEED_STRIDE * run for run in range(3)]
    return Study("matrix", tuple(product(rates, norms, seeds)), steps, side_by_side=True)


def seeds_of(number: int, steps: int) -> Study:
    """Return trainings that differ in their seed."""
    points = tuple((3e-4, 1.0, SEED_STRIDE * run) for run in range(number))
    model = LmSettings(vocabulary=32, width=16, heads=2, layers=1, feed_forward=32, context=8)
    return Study("local", points, steps, side_by_side=True, model=model)


class Span(NamedTuple):
    """Period from the first step of a training to the end of its last, on the machine's clock."""

    begin_s: float
    end_s: float


class TrialSettings(Settings):
    """Settings of the benchmark's experiment."""

    steps: int
    clock: Operational[str]
    model: LmSettings = LmSettings()
    train: TrainStageSettings = TrainStageSettings()


class TimedTask(LanguageModelTask):
    """Training whose rank 0 writes a file with the times at which its steps began and ended.

    The period begins at the first forward pass and ends after the last update, in any loop. Linux's
    monotonic clock is the same for all processes.
    """

    shuffle = False

    def __init__(self, steps: int, samples: int, clock: str, model: LmSettings) -> None:
        super().__init__(model, RandomTokens(model.vocabulary, model.context, samples))
        self.steps, self.clock = steps, clock

    def build_model(self) -> LanguageModel:
        """Return the model with the clock attached."""
        model = super().build_model()
        if not dist.is_initialized() or dist.get_rank() == 0:
            _attach_clock(model, self.steps, Path(self.clock))
        return model


def make_task(steps: int, effective_batch: int, clock: str, model: LmSettings) -> TimedTask:
    """Return the task of a training with the given number of steps."""
    return TimedTask(steps, steps * effective_batch, clock, model)


def spans(clock: Path) -> list[Span]:
    """Return the trainings that wrote a file, in order of time."""
    return sorted(Span(**json.loads(file.read_text())) for file in clock.glob("*.json"))


def _attach_clock(model: nn.Module, steps: int, folder: Path) -> None:
    begin_s: list[float] = []
    done = 0

    def first_forward(*_: Any) -> None:
        begin_s.append(time.monotonic())
        begins.remove()

    def after_step(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == steps:
            span = Span(begin_s[0], time.monotonic())
            # a reused actor must not count the steps of its next trial
            ends.remove()
            (folder / f"{time.monotonic_ns()}.json").write_text(json.dumps(span._asdict()))

    # the loss may call parts of the model instead of the model
    begins = next(model.children()).register_forward_pre_hook(first_forward)
    ends = register_optimizer_step_post_hook(after_step)


def _stages(settings: TrialSettings) -> Sequence[Stage]:
    reads = ("train", "steps", "clock", "model")
    return [train_stage("train", settings.train, _build_task, reads=reads)]


def _build_task(settings: Any, run_dir: RunDirectory | None) -> TimedTask:
    del run_dir
    batch = settings.train.training.effective_batch or 1
    return make_task(settings.steps, batch, settings.clock, settings.model)


EXPERIMENT = Experiment("sweep_benchmark", 1, TrialSettings, _stages)
