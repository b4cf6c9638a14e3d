"""Throughput: samples per second between logged steps, on the device's clock.

On a GPU the marks are CUDA events: they need no synchronisation, and the time of an interval is
read when its row is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

_Mark = float | torch.cuda.Event


@dataclass
class Interval:
    """What lies between two logged steps, without what was no training."""

    steps: int = 0
    samples: int = 0
    waited_s: float = 0.0
    pieces: list[tuple[_Mark, _Mark]] = field(default_factory=list)

    measured_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took; on a GPU this waits for its end."""
        self.measured_s += sum(_seconds(begin, end) for begin, end in self.pieces)
        self.pieces.clear()
        return self.measured_s


class Throughput:
    """Intervals of training; the first one (warm-up, compilation) counts apart."""

    def __init__(self, device: torch.device) -> None:
        self.intervals: list[Interval] = []
        self._device = device
        self._open = Interval()
        self._since: _Mark | None = None

    def start(self) -> None:
        """Training begins, or goes on; nothing changes where it is going."""
        if self._since is None:
            self._since = self._mark()

    def pause(self) -> None:
        """What follows is not training (a checkpoint, an evaluation)."""
        if self._since is not None:
            self._open.pieces.append((self._since, self._mark()))
            self._since = None

    def count(self, samples: int) -> None:
        """A step of so many samples is done."""
        self._open.steps += 1
        self._open.samples += samples

    def waited(self, seconds: float) -> None:
        """So long the loader was waited for."""
        self._open.waited_s += seconds

    def cut(self) -> Interval:
        """End the interval and begin the next one at the same moment."""
        going = self._since is not None
        self.pause()
        ended, self._open = self._open, Interval()
        self.intervals.append(ended)
        if going:
            self.start()
        return ended

    @property
    def samples(self) -> int:
        """How many samples were trained on, the warm-up's too."""
        return sum(interval.samples for interval in self.intervals)

    def summary(self) -> dict[str, float | None]:
        """Means over all intervals but the first: samples a second, seconds a step, waiting.

        ``speed_spread`` is how far the intervals' speeds lie apart, as a share of the mean.
        """
        counted = self.intervals[1:] or self.intervals
        seconds = sum(interval.seconds for interval in counted)
        steps = sum(interval.steps for interval in counted)
        if not steps:
            names = ("samples_per_s", "speed_spread", "step_time_s", "loader_wait_share")
            return dict.fromkeys(names)
        speed = sum(interval.samples for interval in counted) / seconds
        speeds = [each.samples / each.seconds for each in counted if each.steps]
        return {
            "samples_per_s": speed,
            "speed_spread": (max(speeds) - min(speeds)) / speed if len(speeds) > 1 else None,
            "step_time_s": seconds / steps,
            "loader_wait_share": sum(interval.waited_s for interval in counted) / seconds,
        }

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1000
