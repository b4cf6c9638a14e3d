"""Throughput: samples per second between logged steps, on the device's clock.

On a GPU the marks are CUDA events, which need no synchronization. The time of an interval is read
together with its row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from raypipe.hardware import Precision
from raypipe.training.data_sheets import peak_flops

_Mark = float | torch.cuda.Event


@dataclass
class Interval:
    """Training between two logged steps, without checkpoints and evaluations.

    ``phase`` is the phase of its last step.
    """

    phase: str = ""
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
    """Training intervals; the first one (warm-up, compilation) is excluded from the means.

    Phases of a training differ in the work per step, so their speeds are not compared with each
    other.
    """

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

    def cut(self, phase: str = "") -> Interval:
        """End the current interval, start the next one and return the ended one."""
        going = self._since is not None
        self.pause()
        ended, self._open = self._open, Interval()
        ended.phase = phase
        self.intervals.append(ended)
        if going:
            self.start()
        return ended

    def summary(self, *, typical: bool = False) -> dict[str, float | None]:
        """Return samples per second, seconds per step and the share of time waiting for the loader.

        They are means over all intervals but the first, if there are others. ``speed_spread`` is
        the range of the intervals' speeds within a phase, relative to their mean.

        Args:
            typical: whether each phase counts with the median of its intervals, without its first
                one if there are others, so that a short disturbance does not count. Each phase has
                the share of its steps.

        """
        counted = self.intervals[1:] or self.intervals
        seconds = sum(interval.seconds for interval in counted)
        steps = sum(interval.steps for interval in counted)
        if not steps:
            names = ("samples_per_s", "speed_spread", "step_time_s", "loader_wait_share")
            return dict.fromkeys(names)
        phases = list(self._phases(counted))
        samples, duration = float(sum(i.samples for i in counted)), seconds
        if typical:
            samples = duration = steps = 0
            for intervals in self._phases(self.intervals):
                steps += (number := sum(interval.steps for interval in intervals))
                settled = intervals[1:] or intervals
                duration += number * median(i.seconds / i.steps for i in settled)
                samples += sum(interval.samples for interval in intervals)
        spreads = [_spread(intervals) for intervals in phases if len(intervals) > 1]
        return {
            "samples_per_s": samples / duration,
            "speed_spread": max(spreads, default=None),
            "step_time_s": duration / steps,
            "loader_wait_share": sum(interval.waited_s for interval in counted) / seconds,
        }

    def _phases(self, intervals: Sequence[Interval]) -> Iterator[list[Interval]]:
        """Yield the intervals with steps of each phase."""
        for phase in dict.fromkeys(interval.phase for interval in intervals):
            if found := [i for i in intervals if i.phase == phase and i.steps]:
                yield found

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def utilization(
    flops: float | None,
    samples_per_s: float | None,
    device: torch.device,
    precision: Precision,
    workers: int,
) -> dict[str, float | None]:
    """Return the columns ``flops_per_s`` and ``mfu`` from the FLOPs per sample."""
    achieved = None if flops is None or samples_per_s is None else flops * samples_per_s
    peak = None
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), precision)
    mfu = achieved / (peak * workers) if achieved and peak else None
    return {"flops_per_s": achieved, "mfu": mfu}


def _spread(intervals: Sequence[Interval]) -> float:
    """Return the range of the speeds of intervals, relative to their mean."""
    speeds = [interval.samples / interval.seconds for interval in intervals]
    mean = sum(i.samples for i in intervals) / sum(i.seconds for i in intervals)
    return (max(speeds) - min(speeds)) / mean


def _seconds(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1000
