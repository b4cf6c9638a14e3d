"""Samples a second, measured between logged steps."""

from __future__ import annotations

import time


class Throughput:
    """Samples a second between logged steps; the first interval (warm-up) counts apart."""

    def __init__(self) -> None:
        self.intervals: list[tuple[int, int, float]] = []
        self._samples = self._steps = 0
        self._elapsed = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Begin an interval."""
        self._samples = self._steps = 0
        self._elapsed = 0.0
        self._since = time.perf_counter()

    def count(self, samples: int) -> None:
        """A step of so many samples is done."""
        self._samples += samples
        self._steps += 1

    def pause(self) -> None:
        """What follows is not training (a checkpoint)."""
        if self._since is not None:
            self._elapsed += time.perf_counter() - self._since
            self._since = None

    def resume(self) -> None:
        """Training goes on."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """End the interval."""
        self.pause()
        self.intervals.append((self._samples, self._steps, self._elapsed))

    @property
    def latest(self) -> float:
        """Samples a second of the last interval."""
        samples, _, elapsed = self.intervals[-1]
        return samples / elapsed

    def mean(self) -> tuple[float | None, float | None]:
        """Samples a second and seconds a step, without the first interval."""
        counted = self.intervals[1:] or self.intervals
        if not counted:
            return None, None
        samples, steps, elapsed = (sum(column) for column in zip(*counted, strict=True))
        return samples / elapsed, elapsed / steps
