"""Training phases and their learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from raypipe.training.batching import BatchPlan
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
    done = max(0, step - warmup) / max(1, length - warmup)
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


def steps(phases: Sequence[Phase], start: int) -> Iterator[tuple[int, Phase, int]]:
    """Yield (step of the run, phase, step of the phase) from ``start`` on, counted from 0."""
    inside = chain.from_iterable(((phase, n) for n in range(phase.steps)) for phase in phases)
    for step, (phase, phase_step) in enumerate(inside):
        if step >= start:
            yield step, phase, phase_step


def check_phases(phases: Sequence[Phase], plan: BatchPlan) -> None:
    """Reject a phase with fewer samples per step than workers.

    Raises:
        ValueError: a phase has too few samples; the message names it and the numbers.

    """
    for phase in phases:
        if phase.samples < plan.workers:
            raise ValueError(
                f"phase {phase.name}: {phase.samples} samples per step are less than one for "
                f"each of scaling.workers = {plan.workers}"
            )
