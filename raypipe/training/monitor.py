"""Selection of the best model by a held-out metric, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, PositiveInt

from raypipe.config.settings import Settings
from raypipe.report.measures import PREFIX, held_out_columns
from raypipe.store.ledger import Row
from raypipe.store.tables import Column
from raypipe.training.optimizer_settings import Share


class MonitorSettings(Settings):
    """Selection of the best model by an evaluation metric, and early stopping."""

    metric: str | None = None
    """Metric of the evaluation, without its prefix `eval_`; by default the first one that the
    experiment declares (`Experiment.step_metrics`), else the loss.
    """
    mode: Literal["min", "max"] | None = None
    """Whether the metric is minimized or maximized; by default what is declared or its name tells,
    else min.
    """
    patience: PositiveInt | Share | None = 0.4
    """Evaluations without improvement after which the training stops; below 1, a fraction of all
    steps; null never stops.
    """
    min_delta: float = Field(0.0, ge=0)
    """Smallest change of the metric that counts as an improvement."""


def is_scheduled(step: int, every: int | None) -> bool:
    """Whether a step is evaluated: every ``every``-th one.

    By default these are 1 to 8, 10, 12, 14, 16, 20, ...: four for each doubling. They do not depend
    on the length of the training, so that more steps can continue it.
    """
    if every is None:
        every = max(1, 2 ** (step - 1).bit_length() // 8)
    return step % every == 0


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation, at ``step``; the number of evaluations since, and the last one's step.

    ``metric`` is the column of the metric, such as ``eval_loss``.
    """

    metric: str
    step: int
    since: int
    last: int

    def is_over(self, patience: float | None, steps: int) -> bool:
        """Whether a training of ``steps`` steps has waited long enough for a better one."""
        if patience is None:
            return False
        if patience < 1:
            return self.last - self.step >= patience * steps
        return self.since >= patience


def best_of(
    rows: Iterable[Row], monitor: MonitorSettings, declared: Sequence[Column]
) -> BestEvaluation | None:
    """Return the best of the evaluated rows; None if none has a finite metric.

    A change of at most ``min_delta`` is not an improvement.

    Raises:
        ValueError: the rows do not have the metric.

    """
    measured = [row for row in rows if _names(row)]
    if not measured:
        return None
    metric, sign = _metric(measured[-1], monitor, declared)
    step, best, since = None, math.inf, 0
    for row in measured:
        cost = sign * (math.nan if row.get(metric) is None else row[metric])
        if math.isfinite(cost) and (step is None or cost < best - monitor.min_delta):
            step, best, since = row["step"], cost, 0
        else:
            since += 1
    return None if step is None else BestEvaluation(metric, step, since, measured[-1]["step"])


def _metric(row: Row, monitor: MonitorSettings, declared: Sequence[Column]) -> tuple[str, int]:
    """Return the monitored column of a row, and 1 if less of it is better, else -1."""
    names = _names(row)
    if monitor.metric is None:
        known = {each.name for each in declared}
        own = [name for name in names if name in known] or [f"{PREFIX}loss"]
        column = held_out_columns(own, declared)[0]
    else:
        name = f"{PREFIX}{monitor.metric}"
        if name not in names:
            found = ", ".join(sorted(each.removeprefix(PREFIX) for each in names))
            raise ValueError(
                f"training.monitor.metric = {monitor.metric}: the evaluation of this task has "
                f"{found or 'no measures'}"
            )
        (column,) = held_out_columns([name], declared)
    mode = monitor.mode or ("max" if column.better == "higher" else "min")
    return column.name, -1 if mode == "max" else 1


def _names(row: Row) -> list[str]:
    """Return the held-out columns of a row that was evaluated; of others, none."""
    return [name for name in row if name.startswith(PREFIX) and row[name] is not None]
