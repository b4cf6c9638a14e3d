"""Early stopping, and the best step: which steps are evaluated, and which evaluation is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.report.results import PREFIX, held_out_columns
from raypipe.training.job import TrainingJob
from raypipe.training.settings import MonitorSettings


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation, at ``step``; the number of evaluations since, and the last one's step.

    ``metric`` is the column of the metric, such as ``eval_loss``.
    """

    metric: str
    step: int
    since: int
    last: int


class Monitor:
    """Choice of the best model of a training by its rows of the table ``steps``.

    By default only held-out data chooses it. Without a choice, as in a measured run, which does not
    evaluate, the model is that of the last step.
    """

    def __init__(self, job: TrainingJob, *, has_held_out: bool) -> None:
        training = job.settings.training
        monitor = None if job.measured else training.monitor
        chooses = monitor is not None and (has_held_out or monitor.metric is not None)
        self._settings = monitor if chooses else None
        self._every, self._whole = training.eval_every, job.whole
        self._declared = job.steps_table.columns

    def is_evaluated(self, step: int) -> bool:
        """Whether a step is evaluated in any training that goes beyond it.

        These steps alone are compared, and the last one at the end: one that goes on is then the
        beginning of a longer one. By default they are 1 to 8, 10, 12, 14, 16, 20, ...: four for
        each doubling, whatever the length of the training.
        """
        if self._settings is None and self._every is None:
            return False
        return step % (self._every or max(1, 2 ** step.bit_length() // 8)) == 0

    def best(
        self, rows: Sequence[Mapping[str, Any]], until: int | None = None
    ) -> BestEvaluation | None:
        """Return the best evaluation, also of the last step; else of the steps up to ``until``.

        None if no row has a finite metric.

        Raises:
            ValueError: the rows do not have the metric.

        """
        if self._settings is None:
            return None
        judged = [row for row in rows if _measures(row) and self._is_judged(row["step"], until)]
        if not judged:
            return None
        metric, choose = self._metric(judged[-1])
        values = [math.nan if (value := row.get(metric)) is None else value for row in judged]
        finite = [number for number, value in enumerate(values) if math.isfinite(value)]
        if not finite:
            return None
        best = choose(finite, key=values.__getitem__)
        since = len(judged) - 1 - best
        return BestEvaluation(metric, judged[best]["step"], since, judged[-1]["step"])

    def is_over(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the training should stop, or a resumed one had already stopped."""
        best = self.best(rows)
        patience = None if self._settings is None else self._settings.patience
        if best is None or patience is None or best.last >= self._whole:
            return False
        if patience < 1:
            return best.last - best.step >= patience * self._whole
        return best.since >= patience

    def _is_judged(self, step: int, until: int | None) -> bool:
        if until is None:
            return step == self._whole or self.is_evaluated(step)
        return step <= until and self.is_evaluated(step)

    def _metric(self, row: Mapping[str, Any]) -> tuple[str, Callable[..., int]]:
        """Return the monitored column of a row, and ``min`` or ``max``, which is better of it."""
        names, settings = _measures(row), self._settings or MonitorSettings()
        if settings.metric is None:
            declared = {column.name for column in self._declared}
            wanted = [name for name in names if name in declared] or [f"{PREFIX}loss"]
        else:
            wanted = [f"{PREFIX}{settings.metric}"]
            if wanted[0] not in names:
                found = ", ".join(sorted(name.removeprefix(PREFIX) for name in names))
                raise ValueError(
                    f"training.monitor.metric = {settings.metric}: the evaluation of this task has "
                    f"{found or 'no measures'}"
                )
        column = held_out_columns(wanted, self._declared)[0]
        mode = settings.mode or ("max" if column.better == "higher" else "min")
        return column.name, {"min": min, "max": max}[mode]


def _measures(row: Mapping[str, Any]) -> list[str]:
    """Return the held-out columns of a row that was evaluated; of others, none."""
    return [name for name in row if name.startswith(PREFIX) and row[name] is not None]
