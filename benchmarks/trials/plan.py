"""Plan of the benchmark: the trials of a sweep."""

from __future__ import annotations

from dataclasses import dataclass


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
