"""Section of training runs: held-out metrics, loss, speed and hardware by step, and all runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from raypipe.report import plots
from raypipe.report.best import Tables, as_numbers, point_label
from raypipe.report.formatting import counted, heading
from raypipe.report.measures import PREFIX, held_out_columns
from raypipe.report.parts import Part, Pill, Section, TableView, cells
from raypipe.report.plots import Line, Plot, finite, thinned
from raypipe.store.tables import Column

#: the stage of a trial of a sweep; ``trained_stage`` is the stage that it trained
SWEEP = "sweep"
#: standard deviations by which one evaluation may differ from the curve by chance
_DEVIATIONS = 2.5
#: smallest relative change that counts, where the noise cannot be estimated or is zero
_SMALLEST = 0.01
#: fewest values whose noise can be told from their curve
_LEAST_VALUES = 8
_COLUMNS = (
    "trial_id", "status", "precision", "micro_batch", "accumulation", "workers", "effective_batch",
    "steps", "samples_per_s", "step_time_s", "gpu_util_mean", "gpu_peak_bytes", "energy_j",
    "loss_final",
)  # fmt: skip


#: titles of the columns of which each stage has a plot, by their table and what has a line each
CHARTS = {
    ("steps", "trial_id"): {
        "loss": "training loss", "lr": "learning rate", "samples_per_s": "samples per second"
    },
    ("gpu_samples", "gpu_uuid"): {"util": "GPU utilization, %", "memory_bytes": "GPU memory, GiB"},
    ("gpu_samples", "rank"): {
        "cpu_util": "CPU use, % of one core", "rss_bytes": "resident memory, GiB"
    },
}  # fmt: skip


@dataclass(frozen=True)
class EvaluationCurve:
    """The values of a held-out metric in one training run, by step.

    Args:
        stage: the stage of the run.
        trial: its trial_id.
        column: the metric, such as ``eval_loss``; ``better`` may be empty.
        steps: ``[n]``, rising.
        values: ``[n]``, finite.
        baseline: name of the same metric of a baseline, or empty.
        baseline_values: ``[n]``, its values, NaN where there are none.
        kept: the position of the model that the run kept: the last one, unless held-out data chose.
        chosen: whether held-out data chose the model.

    """

    stage: str
    trial: str
    column: Column
    steps: NDArray[np.floating[Any]]
    values: NDArray[np.floating[Any]]
    baseline: str
    baseline_values: NDArray[np.floating[Any]]
    kept: int
    chosen: bool

    @property
    def name(self) -> str:
        """The metric for readers: ``held-out loss``."""
        return heading(self.column.name)

    @property
    def costs(self) -> NDArray[np.floating[Any]]:
        """The values with the sign that makes lower ones better."""
        return -self.values if self.column.better == "higher" else self.values

    @property
    def best(self) -> int:
        """The position of the best value; the first of equal ones."""
        return int(self.costs.argmin())

    @property
    def ends_worse(self) -> bool:
        """Whether the end is worse than the best by more than noise.

        The best of n values with normal noise is about sqrt(2 ln n) standard deviations off.
        """
        if not self.column.better or len(self.values) < 2:
            return False
        deviations = _DEVIATIONS + math.sqrt(2 * math.log(len(self.values)))
        smallest = _SMALLEST * float(np.abs(self.values).max())
        difference = float(self.costs[-1] - self.costs.min())
        return difference > max(deviations * noise(self.values), smallest)

    def beats_baseline(self, place: int) -> bool:
        """Whether a value is better than that of the baseline, if that has one."""
        rival = self.baseline_values[place]
        sign = -1 if self.column.better == "higher" else 1
        return not np.isfinite(rival) or bool(self.costs[place] < sign * rival)


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
    tables: Tables, metrics: Sequence[Column], monitors: Mapping[str, str]
) -> list[EvaluationCurve]:
    """Return every held-out metric of every training run, the most important metric first.

    Trials of a sweep are left out.

    Args:
        tables: of the run.
        metrics: declarations of the columns ``eval_...``; others are taken from their names.
        monitors: the monitored columns (:func:`raypipe.report.measures.monitors_of`).

    """
    trials = tables.get("trials", pd.DataFrame()).reindex(columns=["trial_id", "best_step"])
    chosen = dict(trials.dropna().to_numpy())
    steps = _staged(tables, "steps").sort_values("step", kind="stable")
    found = []
    for column in held_out_columns(map(str, steps), metrics, monitors):
        known = steps[np.isfinite(as_numbers(steps[column.name]))]
        rival = column.baseline if column.baseline in steps else ""
        for (stage, trial), own in known.groupby(["stage", "trial_id"], sort=False):
            at, values = (as_numbers(own[n]).to_numpy() for n in ("step", column.name))
            others = as_numbers(own[rival]).to_numpy() if rival else np.full(len(own), np.nan)
            places = np.flatnonzero(at == chosen.get(trial, np.nan))
            kept = int(places[0]) if len(places) else len(at) - 1
            baseline, is_chosen = heading(rival.removeprefix(PREFIX)), trial in chosen
            about = str(stage), str(trial), column
            curve = EvaluationCurve(*about, at, values, baseline, others, kept, is_chosen)
            found.append(curve)
    return found


def _staged(tables: Tables, name: str) -> pd.DataFrame:
    """Return the rows that are not of sweeps; the table ``trials`` has the stage of a row."""
    table, trials = tables.get(name), tables.get("trials")
    if table is None or table.empty:
        return pd.DataFrame(columns=["stage", "trial_id", "step"])
    if "stage" not in table.columns:
        known = () if trials is None else zip(trials["trial_id"], trials["stage"], strict=True)
        stages = dict(known)
        own = [stages.get(trial, str(trial).partition("@")[0]) for trial in table["trial_id"]]
        table = table.assign(stage=own)
    return table[table["stage"] != SWEEP]


def training_section(tables: Tables, found: Sequence[EvaluationCurve]) -> Section:
    """Return the plots and the trials of training stages; a sweep's trials are in its section."""
    parts: list[Part] = [*_evaluation_plots(found), *training_plots(tables)]
    trials = tables.get("trials", pd.DataFrame({"stage": [], "status": []}))
    trials = trials[trials["stage"] != SWEEP]
    ends = [name for name in map(str, trials.columns) if name.startswith(PREFIX)]
    pills = cells(Pill.of_status(str(status)) for status in trials["status"])
    meanings = {name: f"{heading(name)} at the last evaluation" for name in ends}
    columns = [*_COLUMNS, *ends, "attempts", "device"]
    view = TableView(trials.assign(status=pills), columns, "Training runs", meanings=meanings)
    return Section("Training runs", [*parts, view])


def _evaluation_plots(found: Sequence[EvaluationCurve]) -> Iterator[Plot]:
    """Draw each metric of each stage by step, a line per run; not those with one value per run."""
    groups: dict[tuple[str, str], list[EvaluationCurve]] = {}
    for each in found:
        groups.setdefault((each.stage, each.column.name), []).append(each)
    for (stage, metric), curves in groups.items():
        if max(len(curve.steps) for curve in curves) < 2:
            continue
        labels = short_names([curve.trial for curve in curves])
        drawn = [
            Line(labels[c.trial], thinned(c.steps), thinned(c.values), column=metric)
            for c in curves
        ]
        name, better = curves[0].name, curves[0].column.better
        figure = plots.lines(drawn, "optimizer step", name, better=better)
        caption = f"{better.capitalize()} is better; a ring is the best step." if better else ""
        if worse := sum(curve.ends_worse for curve in curves):
            caption += f" {worse} of {counted(len(curves), 'run')} "
            caption += "ended worse than the best by more than noise."
        yield Plot(f"{metric}-{stage}", f"{name[:1].upper()}{name[1:]}: {stage}", caption, figure)


def training_plots(tables: Tables) -> Iterator[Plot]:
    """Draw loss, learning rate and speed by step, and the use of the hardware by time.

    Each stage has its own plots, of what was measured. A sweep's trials have other plots.
    """
    for (table, each), titles in CHARTS.items():
        rows = _staged(tables, table)
        for column in (column for column in titles if column in rows):
            for stage, own in rows.groupby("stage", sort=False):
                values = finite(as_numbers(own[column]))
                if len(values) and (column != "lr" or np.unique(values).size > 1):
                    yield _chart(str(stage), own, column, titles[column], each)


def _chart(stage: str, table: pd.DataFrame, column: str, title: str, each: str) -> Plot:
    xlabel = "optimizer step"
    if "at" in table:
        table = table.assign(step=(table["at"] - table["at"].min()).dt.total_seconds())
        xlabel = "time, s"
    table = table.dropna(subset=[each, column]).sort_values("step", kind="stable")
    if each == "rank":
        table = table.assign(rank=[f"worker {rank:.0f}" for rank in table["rank"]])
    scale = 2**30 if column.endswith("_bytes") else 1
    labels = short_names(list(dict.fromkeys(map(str, table[each]))))
    drawn = step_lines(table.assign(**{column: table[column] / scale}), column, labels, each)
    figure = plots.lines(drawn, xlabel, title)
    title = f"{title[:1].upper()}{title[1:]}: {stage}"
    return Plot(f"{column}-{stage}", title, counted(len(drawn), "line"), figure)


def step_lines(
    steps: pd.DataFrame, column: str, labels: Mapping[str, str], each: str = "trial_id"
) -> list[Line]:
    """Return a line per trial, attempt and value of ``each``, from rows in order of their steps.

    Loss and speed are smoothed by the running median over a thirtieth of the points, which keeps
    jumps.
    """
    drawn = []
    several = dict.fromkeys(name for name in (each, "trial_id", "attempt") if name in steps)
    for (of, *_), own in steps.groupby(list(several), sort=False):
        known = own[np.isfinite(as_numbers(own[column]))]
        raw = as_numbers(known[column])
        if raw.empty:
            continue
        window = max(1, len(raw) // 30) | 1 if column in ("loss", "samples_per_s") else 1
        smooth = raw.rolling(window, center=True, min_periods=1).median()
        x, y, thin = (thinned(values.to_numpy(float)) for values in (known["step"], smooth, raw))
        drawn.append(Line(labels[str(of)], x, y, raw=thin, column=column))
    return drawn


def short_names(trials: Sequence[str]) -> dict[str, str]:
    """Return short names of trials, ``train@model.layers=2,seed=1``, by what tells them apart."""
    parts = {}
    for trial in trials:
        stage, _, variant = trial.partition("@")
        values = [part.partition("=")[::2] for part in variant.split(",") if part]
        parts[trial] = dict([("", stage), *values])
    table = pd.DataFrame.from_dict(parts, orient="index")
    varied = table.loc[:, table.nunique(dropna=False) > 1]
    return {str(trial): point_label(dict(row.dropna())) or str(trial)
            for trial, row in varied.iterrows()}  # fmt: skip
