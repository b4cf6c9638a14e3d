"""Throughput: samples per second between logged steps, on the device's clock.

On a GPU the marks are CUDA events, which need no synchronization. The time of an interval is read
together with its row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

_Mark = float | torch.cuda.Event


@dataclass
class Interval:
    """Training between two logged steps, without checkpoints and evaluations."""

    steps: int = 0
    samples: int = 0
    waited_s: float = 0.0
    pieces: list[tuple[_Mark, _Mark]] = field(default_factory=list)

    measured_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration of the interval; on a GPU this waits for its end."""
        self.measured_s += sum(_seconds(begin, end) for begin, end in self.pieces)
        self.pieces.clear()
        return self.measured_s


class Throughput:
    """Training intervals; the first one (warm-up, compilation) is excluded from the means."""

    def __init__(self, device: torch.device) -> None:
        self.intervals: list[Interval] = []
        self._device = device
        self._open = Interval()
        self._since: _Mark | None = None

    def start(self) -> None:
        """Start or resume the clock; no effect if it is running."""
        if self._since is None:
            self._since = self._mark()

    def pause(self) -> None:
        """Pause the clock, for work other than training (a checkpoint, an evaluation)."""
        if self._since is not None:
            self._open.pieces.append((self._since, self._mark()))
            self._since = None

    def count(self, samples: int) -> None:
        """Record a completed step of ``samples`` samples."""
        self._open.steps += 1
        self._open.samples += samples

    def waited(self, seconds: float) -> None:
        """Record the seconds spent waiting for the loader."""
        self._open.waited_s += seconds

    def cut(self) -> Interval:
        """End the current interval, start the next one and return the ended one."""
        going = self._since is not None
        self.pause()
        ended, self._open = self._open, Interval()
        self.intervals.append(ended)
        if going:
            self.start()
        return ended

    @property
    def samples(self) -> int:
        """Number of samples trained on, including the warm-up."""
        return sum(interval.samples for interval in self.intervals)

    def summary(self) -> dict[str, float | None]:
        """Return samples per second, seconds per step and the share of time waiting for the loader.

        They are means over all intervals but the first, if there are others. ``speed_spread`` is
        the range of the intervals' speeds, relative to the mean.
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
