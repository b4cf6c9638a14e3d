"""Training phases and their learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from raypipe.training.batching import BatchPlan
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import Phase


def learning_rate(training: TrainingSettings, phase: Phase, step: int) -> float:
    """Return the learning rate of a phase's step: linear warm-up, then the schedule.

    Steps are counted from 0.
    """
    warmup = min(training.warmup_steps, phase.steps)
    if warmup < 1:
        warmup = round(warmup * phase.steps)
    if step < warmup:
        return phase.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, phase.steps - warmup)
    left = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[training.schedule]
    floor = training.min_lr_ratio
    return phase.learning_rate * (floor + (1.0 - floor) * left)


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
