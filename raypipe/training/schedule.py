"""Training phases and their learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypipe.training.settings import TrainingSettings


@dataclass(frozen=True)
class Phase:
    """Consecutive steps with their own batch size (``samples`` per step) and learning rate.

    The warm-up and the schedule of the settings run once over each phase.
    """

    name: str
    steps: int
    samples: int
    learning_rate: float


def learning_rate(training: TrainingSettings, phase: Phase, step: int) -> float:
    """Return the learning rate of a phase's step: linear warm-up, then the schedule.

    The decay of ``warmup-stable-decay`` falls with the root of its steps (Haegele et al. 2024,
    "Scaling laws and compute-optimal training beyond fixed training durations", section 3). Steps
    are counted from 0.
    """
    length = phase.steps
    warmup = _steps(training.warmup_steps, length)
    if step < warmup:
        return phase.learning_rate * (step + 1) / warmup
    if training.schedule == "warmup-stable-decay":
        warmup = max(warmup, length - _steps(training.decay_steps, length))
    if step < warmup:  # and stable
        return phase.learning_rate
    done = (step - warmup) / (length - warmup)
    left = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "warmup-stable-decay": 1.0 - math.sqrt(done),
    }[training.schedule]
    floor = training.min_lr_ratio
    return phase.learning_rate * (floor + (1.0 - floor) * left)


def _steps(given: float, length: int) -> int:
    """Return a number of steps, of which below 1 is a fraction of the length."""
    return round(given * length) if given < 1 else min(round(given), length)


def steps(phases: Sequence[Phase], start: int) -> Iterator[tuple[int, Phase, int, int]]:
    """Yield each step from ``start`` on, and the position of its first sample in the data.

    A step is its number in the run, its phase and its number in the phase, counted from 0.
    Positions continue across phases.
    """
    step = position = 0
    for phase in phases:
        for number in range(max(0, start - step), phase.steps):
            yield step + number, phase, number, position + number * phase.samples
        step += phase.steps
        position += phase.steps * phase.samples
