"""Plans of the benchmarks: the trials of a sweep, and the trainings of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Plan:
    """``trials`` trials, one per seed, with the same number of steps and workers."""

    workers: int
    trials: int
    steps: int
    micro_batch: int = 4
    learning_rate: float = 3e-4
    clip_norm: float = 1.0

    @property
    def seeds(self) -> list[int]:
        """Seeds of the trials."""
        return list(range(self.trials))

    @property
    def effective_batch(self) -> int:
        """Samples per step, over all workers."""
        return self.micro_batch * self.workers


@dataclass(frozen=True)
class Grid:
    """A training for each learning rate, clip norm and run; one worker on one CPU each."""

    steps: int
    learning_rates: tuple[float, ...] = (1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3)
    clip_norms: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    runs: int = 3
    micro_batch: int = 4

    @property
    def points(self) -> list[tuple[float, float, int]]:
        """Learning rate, clip norm and run of each training."""
        return list(product(self.learning_rates, self.clip_norms, range(self.runs)))
