"""History of logged steps: copied from the device asynchronously, stored at checkpoints.

The values of a logged step are copied to the host while training continues. They become a row at
the next logged step, checkpoint or evaluation, so logging does not stall the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raypipe.store import tables as results
from raypipe.training.job import Report, TrainingJob
from raypipe.training.monitor import BestEvaluation, MonitorSettings, best_of
from raypipe.training.throughput import Interval

Row = dict[str, Any]
#: number of consecutive non-finite logged losses that end an fp16 training
_OVERFLOWS = 10


@dataclass
class _Pending:
    """Row whose values may still be in transfer from the device."""

    row: Row
    names: list[str]
    values: Tensor
    arrived: torch.cuda.Event | None
    interval: Interval


class History:
    """Rows of the table ``steps`` of one run; the sums are the same on every worker."""

    def __init__(self, job: TrainingJob, report: Report, *, tolerate_overflow: bool) -> None:
        self.rows: list[Row] = []
        self._job, self._report = job, report
        self._tolerate_overflow = tolerate_overflow
        self._pending: _Pending | None = None

    def note(self, row: Row, sums: Mapping[str, Tensor], interval: Interval) -> None:
        """Record a logged step with its ``sums``, which are divided by the sum ``weight``.

        ``interval_weight`` (the weight since the last logged step) and ``grad_norm`` are not
        divided.
        """
        self.settle()
        names = sorted(sums)
        packed = torch.stack([sums[name].double() for name in names])
        arrived = None
        if packed.is_cuda:
            packed = packed.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._pending = _Pending(row, names, packed, arrived, interval)

    def settle(self, measures: Mapping[str, float] | None = None) -> None:
        """Turn the recorded step into a row, with its evaluation measures, and report it.

        Raises:
            FloatingPointError: the loss is not finite.

        """
        if self._pending is None:
            return
        noted, self._pending = self._pending, None
        if noted.arrived is not None:
            noted.arrived.synchronize()
        values = dict(zip(noted.names, noted.values.tolist(), strict=True))
        row = noted.row
        weight, seen = values.pop("weight"), values.pop("interval_weight")
        row["grad_norm"] = values.pop("grad_norm")
        row |= {name: value / weight for name, value in values.items()}
        # fp16 skips steps whose gradients overflow
        if not math.isfinite(row["loss"]) and (
            not self._tolerate_overflow or self._overflows_for_good(row)
        ):
            raise FloatingPointError(
                f"the loss is {row['loss']} at step {row['step']}; lower training.learning_rate "
                "or set training.clip_norm"
            )
        seconds = noted.interval.seconds
        row["samples_per_s"] = noted.interval.samples / seconds
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

    def best(
        self, monitor: MonitorSettings, judged: Callable[[int], bool]
    ) -> BestEvaluation | None:
        """Return the best evaluation of the steps that are judged; None without one."""
        rows = [row for row in self.rows if judged(row["step"])]
        return best_of(rows, monitor, self._job.steps_table.columns)
