"""The trials of a sweep of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """As many trials as ``trials``, one a seed, with the same number of steps and workers."""

    workers: int
    trials: int
    steps: int
    micro_batch: int = 4
    learning_rate: float = 3e-4
    clip_norm: float = 1.0

    @property
    def seeds(self) -> list[int]:
        """The seed of each trial."""
        return list(range(self.trials))

    @property
    def effective_batch(self) -> int:
        """Samples a step, of all workers."""
        return self.micro_batch * self.workers
