"""Held-out metrics during training: the best step of each run, and whether its end is worse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from raypipe.report.formatting import heading, with_unit
from raypipe.report.measures import PREFIX, held_out_columns
from raypipe.report.plots import finite, rows
from raypipe.report.table_shape import as_numbers
from raypipe.store.tables import Column

#: standard deviations by which one evaluation may differ from the curve by chance
_DEVIATIONS = 2.5
#: smallest relative change that counts, where the noise cannot be estimated or is zero
_SMALLEST = 0.01
#: fewest values whose noise can be told from their curve
_LEAST_VALUES = 8
#: training losses at the end that are averaged, as that of one batch is noisy
_LAST = 10


@dataclass(frozen=True)
class EvaluationCurve:
    """The values of a held-out metric in one training run, by step.

    Args:
        stage: the stage of the run.
        trial: its trial_id.
        metric: the column, such as ``eval_loss``.
        better: ``lower``, ``higher``, or empty if unknown.
        steps: ``[n]``, rising.
        values: ``[n]``, finite.
        unit: of the values, or empty.
        baseline: name of the same metric of a baseline, or empty.
        baseline_values: ``[n]``, its values, NaN where there are none.
        memorizes: whether the training loss ends at less than half of the held-out loss.

    """

    stage: str
    trial: str
    metric: str
    better: str
    steps: NDArray[np.floating[Any]]
    values: NDArray[np.floating[Any]]
    unit: str = ""
    baseline: str = ""
    baseline_values: NDArray[np.floating[Any]] | None = None
    memorizes: bool = False

    @property
    def label(self) -> str:
        """The metric for readers, with its unit and the better direction."""
        return with_unit(self.name, self.metric, self.unit, self.better)

    @property
    def name(self) -> str:
        """The metric for readers: ``held-out loss``."""
        return heading(self.metric)

    @property
    def costs(self) -> NDArray[np.floating[Any]]:
        """The values with the sign that makes lower ones better."""
        return -self.values if self.better == "higher" else self.values

    @property
    def best(self) -> int:
        """The position of the best value; the first of equal ones."""
        return int(self.costs.argmin())

    @property
    def ends_worse(self) -> bool:
        """Whether the end is worse than the best by more than noise."""
        if not self.better or len(self.values) < 2:
            return False
        return float(self.costs[-1] - self.costs.min()) > self._threshold

    @property
    def still_improves(self) -> bool:
        """Whether the last evaluation is the best, by more than noise over the last quarter."""
        count = len(self.values)
        if not self.better or count < 4 or self.best != count - 1:
            return False
        earlier = self.costs[max(0, count - 1 - max(1, count // 4))]
        return float(earlier - self.costs[-1]) > self._threshold

    @property
    def _threshold(self) -> float:
        """The difference of the end to the best that chance alone may give.

        The best of n values with normal noise is about sqrt(2 ln n) standard deviations off.
        """
        deviations = _DEVIATIONS + math.sqrt(2 * math.log(len(self.values)))
        smallest = _SMALLEST * float(np.abs(self.values).max())
        return max(deviations * noise(self.values), smallest)


def noise(values: ArrayLike) -> float:
    """Return the standard deviation of the noise of a curve; 0 for fewer than eight values.

    It is estimated from the differences of each value to the mean of its two neighbors, which a
    smooth curve hardly has (Gasser, Sroka and Jennen-Steinmetz 1986, "Residual variance and
    residual pattern in nonlinear regression"), by their median, so that jumps do not count.
    """
    known = np.asarray(values, dtype=np.float64)
    if len(known) < _LEAST_VALUES:
        return 0.0
    differences = known[1:-1] - (known[:-2] + known[2:]) / 2
    return 1.4826 * float(np.median(np.abs(differences))) / math.sqrt(1.5)


def evaluations(
    tables: Mapping[str, pd.DataFrame],
    metrics: Sequence[Column],
    swept: str,
    monitors: Mapping[str, str],
) -> list[EvaluationCurve]:
    """Return every held-out metric of every training run, the most important metric first.

    Args:
        tables: of the run.
        metrics: declarations of the columns ``eval_...``; others are taken from their names.
        swept: the stage of a sweep's trials, which are left out.
        monitors: the monitored columns (:func:`monitors_of`).

    """
    steps = rows(tables, "steps")
    if steps is None:
        return []
    stages = _stages(tables)
    memorizing = _memorizing(steps)
    found = []
    for column in held_out_columns(map(str, steps.columns), metrics, monitors):
        name = column.name
        rival = column.baseline if column.baseline in steps.columns else ""
        for trial, group in _measured(steps, name):
            stage = stages.get(trial, trial.partition("@")[0])
            if stage != swept:
                values = as_numbers(group[name]).to_numpy(np.float64)
                step = as_numbers(group["step"]).to_numpy(np.float64)
                others = as_numbers(group[rival]).to_numpy(np.float64) if rival else None
                found.append(
                    EvaluationCurve(
                        stage, trial, name, column.better, step, values, column.unit,
                        heading(rival.removeprefix(PREFIX)), others, trial in memorizing,
                    )
                )  # fmt: skip
    return found


def _measured(steps: pd.DataFrame, name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    known = steps[np.isfinite(as_numbers(steps[name]))].sort_values("step", kind="stable")
    for trial, group in known.groupby("trial_id", sort=False):
        if finite(as_numbers(group[name])).size:
            yield str(trial), group


def _memorizing(steps: pd.DataFrame) -> set[str]:
    """Return the trainings whose loss ends at less than half of that of held-out data."""
    if not {"loss", f"{PREFIX}loss"} <= {*steps.columns}:
        return set()
    found = set()
    for trial, group in steps.sort_values("step", kind="stable").groupby("trial_id", sort=False):
        own, held_out = (finite(as_numbers(group[name])) for name in ("loss", f"{PREFIX}loss"))
        if own.size and held_out.size and 0 <= np.mean(own[-_LAST:]) < held_out[-1] / 2:
            found.add(str(trial))
    return found


def _stages(tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    trials = rows(tables, "trials")
    if trials is None:
        return {}
    return dict(zip(trials["trial_id"].astype(str), trials["stage"].astype(str), strict=True))
