"""History of a training: throughput and logged steps.

The values of a logged step are copied from the device while the training continues. They become a
row at the next logged step, checkpoint or evaluation, so logging does not stall the device. Time is
that of the device's clock: on a GPU the marks are CUDA events, which need no synchronization.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from raypipe.store import tables as results
from raypipe.training.job import Report, TrainingJob
from raypipe.training.parallel import HostCopy

Row = dict[str, Any]
#: number of consecutive non-finite logged losses that end an fp16 training
_OVERFLOWS = 10
_Mark = float | torch.cuda.Event


@dataclass
class Interval:
    """Training between two logged steps, without checkpoints and evaluations."""

    steps: int = 0
    samples: int = 0
    waited_s: float = 0.0
    pieces: list[tuple[_Mark, _Mark]] = field(default_factory=list)

    @cached_property
    def seconds(self) -> float:
        """Duration of the ended interval; on a GPU this waits for its end."""
        seconds = sum(_seconds(begin, end) for begin, end in self.pieces)
        self.pieces.clear()
        return seconds


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
        self.pause()
        ended, self._open = self._open, Interval()
        self.intervals.append(ended)
        self.start()
        return ended

    def summary(self) -> dict[str, float | None]:
        """Return samples per second, seconds per step and the share of time waiting for the loader.

        They are means over all intervals but the first, if there are others.
        """
        counted = self.intervals[1:] or self.intervals
        steps = sum(interval.steps for interval in counted)
        if not steps:
            return dict.fromkeys(("samples_per_s", "step_time_s", "loader_wait_share"))
        seconds = sum(interval.seconds for interval in counted)
        return {
            "samples_per_s": sum(interval.samples for interval in counted) / seconds,
            "step_time_s": seconds / steps,
            "loader_wait_share": sum(interval.waited_s for interval in counted) / seconds,
        }

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class History:
    """Rows of the table ``steps`` of one run; the sums are the same on every worker."""

    def __init__(self, job: TrainingJob, report: Report, *, tolerate_overflow: bool) -> None:
        self.rows: list[Row] = []
        self._job, self._report = job, report
        self._tolerate_overflow = tolerate_overflow
        # the logged step whose values may still be in transfer from the device
        self._pending: tuple[Row, list[str], HostCopy, Interval] | None = None

    def note(self, row: Row, sums: Mapping[str, Tensor], interval: Interval) -> None:
        """Record a logged step with its ``sums``, which are divided by the sum ``weight``.

        ``interval_weight`` (the weight since the last logged step) and ``grad_norm`` are not
        divided.
        """
        self.settle()
        names = sorted(sums)
        packed = HostCopy(torch.stack([sums[name].double() for name in names]))
        self._pending = row, names, packed, interval

    def settle(self, measures: Mapping[str, float] | None = None) -> None:
        """Turn the recorded step into a row, with its evaluation measures, and report it.

        Raises:
            FloatingPointError: the loss is not finite, or nothing counts in it.

        """
        if self._pending is None:
            return
        (row, names, packed, interval), self._pending = self._pending, None
        values = dict(zip(names, packed.values().tolist(), strict=True))
        weight, seen = values.pop("weight"), values.pop("interval_weight")
        row["grad_norm"] = values.pop("grad_norm")
        if weight == 0:
            raise FloatingPointError(
                f"the weights of step {row['step']} sum to 0: no sample or token counts in its "
                "loss; leave out samples without a weight"
            )
        row |= {name: value / weight for name, value in values.items()}
        # fp16 skips steps whose gradients overflow
        if not math.isfinite(row["loss"]) and (
            not self._tolerate_overflow or self._overflows_for_good(row)
        ):
            raise FloatingPointError(
                f"the loss is {row['loss']} at step {row['step']}; lower training.learning_rate "
                "or set training.clip_norm"
            )
        seconds = interval.seconds
        row["samples_per_s"] = interval.samples / seconds
        if self._job.task.counts == "tokens":
            row["tokens_per_s"] = seen / seconds
        row |= {f"eval_{name}": value for name, value in (measures or {}).items()}
        self.rows.append(row)
        self._report(row)

    def _overflows_for_good(self, row: Row) -> bool:
        """Whether a smaller scale cannot help: the last logged losses, or all, are not finite."""
        if self._job.measured:
            return False
        losses = [each["loss"] for each in (*self.rows, row)][-_OVERFLOWS:]
        enough = len(losses) == _OVERFLOWS or row["step"] == self._job.steps
        return enough and not any(map(math.isfinite, losses))

    def store(self) -> None:
        """Write the rows to the table ``steps``; only rank 0 calls this."""
        job = self._job
        results.write_table(job.run_dir, job.steps_table, self.rows, job.run_id, job.trial_id)

    def restore(self, step: int) -> None:
        """Read the stored rows up to and including a step."""
        stored = results.read_rows(self._job.run_dir, "steps", self._job.trial_id)
        self.rows = [row for row in stored if row["step"] <= step]


def _seconds(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
