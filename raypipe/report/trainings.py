"""Section of training runs: held-out metrics, loss, speed and hardware by step, and all runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from raypipe.hardware import bytes_text
from raypipe.report import charts, plots
from raypipe.report.best import as_numbers, point_label
from raypipe.report.charts import Line, thinned
from raypipe.report.formatting import cell, counted, heading, number
from raypipe.report.measures import PREFIX, held_out_columns
from raypipe.report.plots import Plot, finite, rows
from raypipe.report.sections import Fold, Part, Pill, Section, TableView, cells
from raypipe.report.variants import Tables
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
_MOST_PLOTS = 6
_MOST_TRIALS = 20  # that are not folded
_LONGEST = 20  # characters of a trial's name
#: logged columns by step: the name of their files, and their title
_LOGGED = {
    "loss": ("loss", "training loss"),
    "lr": ("learning_rate", "learning rate"),
    "samples_per_s": ("throughput", "samples per second"),
}
#: sampled columns of the hardware, the first pair that was measured: titles, and what a line is
_SAMPLED = (
    ("gpu", "gpu_uuid", {"util": "GPU utilization, %", "memory_bytes": "GPU memory, GiB"}),
    ("cpu", "rank", {"cpu_util": "CPU use, % of one core", "rss_bytes": "resident memory, GiB"}),
)


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

    """

    stage: str
    trial: str
    column: Column
    steps: NDArray[np.floating[Any]]
    values: NDArray[np.floating[Any]]
    baseline: str
    baseline_values: NDArray[np.floating[Any]]

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
    found = []
    groups = list(_by_stage(tables, "steps"))
    names = dict.fromkeys(str(name) for _, group in groups for name in group)
    for column in held_out_columns(names, metrics, monitors):
        for stage, group in groups:
            known = group[np.isfinite(as_numbers(group[column.name]))]
            rival = column.baseline if column.baseline in group else ""
            for trial, own in known.sort_values("step", kind="stable").groupby(
                "trial_id", sort=False
            ):
                steps, values = (as_numbers(own[n]).to_numpy() for n in ("step", column.name))
                others = as_numbers(own[rival]).to_numpy() if rival else np.full(len(own), np.nan)
                name = heading(rival.removeprefix(PREFIX))
                found.append(
                    EvaluationCurve(stage, str(trial), column, steps, values, name, others)
                )
    return found


def _by_stage(tables: Tables, name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the rows of each stage but sweeps; the table ``trials`` has the stage of a row."""
    table, trials = rows(tables, name), rows(tables, "trials")
    if table is None:
        return
    if "stage" not in table.columns:
        stages = (
            {} if trials is None else dict(zip(trials["trial_id"], trials["stage"], strict=True))
        )
        own = [stages.get(trial, str(trial).partition("@")[0]) for trial in table["trial_id"]]
        table = table.assign(stage=own)
    for stage, group in table[table["stage"] != SWEEP].groupby("stage", sort=False):
        yield str(stage), group


def training_section(tables: Tables, found: Sequence[EvaluationCurve]) -> Section:
    """Return the plots and the trials of training stages; a sweep's trials are in its section."""
    with plots.style():
        curves = list(_evaluation_plots(found))
        figures = [*curves, *training_plots(tables)]
    count = max(_MOST_PLOTS, len(curves))
    parts: list[Part] = [*figures[:count]]
    if further := figures[count:]:
        parts.append(Fold(f"{counted(len(further), 'more figure')} of speed and hardware", further))
    trials = rows(tables, "trials")
    if trials is not None and len(own := trials[trials["stage"] != SWEEP]):
        view = _trials(own, found)
        folded = Fold(f"All {len(own)} training runs", [view])
        parts.append(view if len(own) <= _MOST_TRIALS else folded)
    return Section("Training runs", parts)


def _trials(trials: pd.DataFrame, found: Sequence[EvaluationCurve]) -> TableView:
    """Return the trials with every held-out metric: of the model, and the best with its step."""
    best: dict[str, dict[str, str]] = {}
    for each in (each for each in found if each.column.better):
        name = f"best_{each.column.name.removeprefix(PREFIX)}"
        value, step = float(each.values[each.best]), each.steps[each.best]
        best.setdefault(name, {})[each.trial] = f"{number(value)} at step {step:.0f}"
    ends = [name for name in map(str, trials.columns) if name.startswith(PREFIX)]
    trials = trials.assign(
        status=cells(Pill.of_status(str(status)) for status in trials["status"]),
        **{name: trials["trial_id"].map(values) for name, values in best.items()},
    )
    measured = [column for name in ends for column in (name, f"best_{name.removeprefix(PREFIX)}")]
    columns = [*_COLUMNS, *measured, "attempts", "device"]
    meanings = {name: f"{heading(name)} at the last evaluation" for name in ends}
    return TableView(trials, columns, "Training runs", meanings=meanings)


def _evaluation_plots(found: Sequence[EvaluationCurve]) -> Iterator[Plot]:
    """Draw each metric of each stage by step, a line per run; not those with one value per run."""

    def key(each: EvaluationCurve) -> tuple[str, str]:
        return each.stage, each.column.name

    order = {pair: place for place, pair in enumerate(dict.fromkeys(map(key, found)))}
    for (stage, metric), group in groupby(sorted(found, key=lambda e: order[key(e)]), key):
        curves = list(group)
        if max(len(curve.steps) for curve in curves) < 2:
            continue
        labels, note = short_names([curve.trial for curve in curves])
        drawn = [
            Line(labels[c.trial], thinned(c.steps), thinned(c.values), column=metric)
            for c in curves
        ]
        name, better = curves[0].name, curves[0].column.better
        figure = charts.lines(drawn, "optimizer step", name, better=better, dots=True)
        caption = _caption(curves) + note
        yield Plot(f"{metric}-{stage}", f"{name[:1].upper()}{name[1:]}: {stage}", caption, figure)


def _caption(curves: Sequence[EvaluationCurve]) -> str:
    better, count = curves[0].column.better, len(curves)
    last = number(float(curves[0].values[-1]))
    if not better:
        return f"At the end {last}." if count == 1 else f"{count} runs."
    worse = sum(curve.ends_worse for curve in curves)
    text = f"{better.capitalize()} is better. The ring is the best step"
    if count == 1:
        end = ", worse than the best by more than noise" if worse else ""
        return f"{text}; the end is {last}{end}."
    text += f" of each of {count} runs." if count <= charts.MOST_LINES else " of all runs."
    return text + (f" {worse} of them end worse than their best." if worse else "")


def training_plots(tables: Tables) -> Iterator[Plot]:
    """Draw loss, learning rate and speed by step, and the use of the hardware by time.

    Each stage has its own plots. The use is that of the GPUs, or of the CPUs if no sample is of a
    GPU. A sweep's trials have other plots.
    """
    stages = list(_by_stage(tables, "steps"))
    for column, (name, title) in _LOGGED.items():
        for stage, steps in stages:
            if plot := _logged(stage, steps, column, name, title):
                yield plot
    for stage, samples in _by_stage(tables, "gpu_samples"):
        yield from _use(stage, samples)


def _logged(stage: str, steps: pd.DataFrame, column: str, name: str, title: str) -> Plot | None:
    """Draw a logged column, a line per run; None without a value, or of an unchanged rate."""
    values = finite(as_numbers(steps[column])) if column in steps else finite([])
    if not values.size or (column == "lr" and np.unique(values).size < 2):
        return None
    labels, note = short_names(list(dict.fromkeys(map(str, steps["trial_id"]))))
    drawn = step_lines(steps, column, labels)
    phases = steps.groupby("phase", sort=False)["step"].min() if "phase" in steps else steps["step"]
    begins = phases.iloc[1:] if "phase" in steps else phases.iloc[:0]
    marks = {str(phase).replace("_", " "): float(step) for phase, step in begins.items()}
    figure = charts.lines(drawn, "optimizer step", title, from_zero=column != "loss", marks=marks)
    last = number(float(as_numbers(steps.sort_values("step")[column]).dropna().iloc[-1]))
    caption = {
        "loss": f"Logged loss (thin) and its running median, {counted(len(drawn), 'run')}; "
        f"the last value is {last}.",
        "lr": f"Peak {number(float(values.max()))}, at the end {last}.",
    }.get(column, f"The median is {number(float(np.median(values)))}.")
    return Plot(
        f"{name}-{stage}", f"{title[:1].upper()}{title[1:]}: {stage}", caption + note, figure
    )


def step_lines(
    steps: pd.DataFrame,
    column: str,
    labels: Mapping[str, str],
    ends: Mapping[str, str] | None = None,
) -> list[Line]:
    """Return a line per trial of a logged column: its running median, and the values themselves.

    The median is over a thirtieth of the points, which keeps jumps; learning rates and held-out
    metrics have none. ``ends`` has the marks of the last points.
    """
    drawn = []
    for trial, own in steps.sort_values("step", kind="stable").groupby("trial_id", sort=False):
        known = own[np.isfinite(as_numbers(own[column]))]
        raw = as_numbers(known[column])
        if not len(raw):
            continue
        window = max(1, len(raw) // 30) | 1
        is_noisy = column != "lr" and not column.startswith(PREFIX)
        smooth = raw.rolling(window, center=True, min_periods=1).median() if is_noisy else raw
        x, y, thin = (thinned(each.to_numpy(float)) for each in (known["step"], smooth, raw))
        end = (ends or {}).get(str(trial), "")
        drawn.append(Line(labels[str(trial)], x, y, raw=thin, end=end, column=column))
    return drawn


def short_names(trials: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return short names of trials by what tells them apart, and a sentence that explains them.

    Names of several keys are the values alone where the keys have no room.
    """
    parts = {name: _values(name) for name in trials}
    keys = dict.fromkeys(key for values in parts.values() for key in values)
    varied = [k for k in keys if len({values.get(k) for values in parts.values()}) > 1]
    own = {name: {k: v for k, v in values.items() if k in varied} for name, values in parts.items()}
    found = {name: point_label(values) or name for name, values in own.items()}
    if max(map(len, found.values()), default=0) <= _LONGEST or not any(varied):
        return found, ""
    named = [key.rpartition(".")[2] or "stage" for key in varied]
    found = {name: ", ".join(values.values()) or name for name, values in own.items()}
    return found, f" Runs are named by {', '.join(named)}."


def _values(trial: str) -> dict[str, str]:
    """Return the values that a trial_id names: ``train@model.layers=2,seed=1``."""
    stage, _, variant = trial.partition("@")
    values = dict(part.partition("=")[::2] for part in variant.split(",")) if variant else {}
    return {"": stage, **values}


def _use(stage: str, samples: pd.DataFrame) -> Iterator[Plot]:
    """Draw the use of the GPUs, or of the CPUs if no GPU was measured, since the first sample."""
    at = samples["at"]
    if not pd.api.types.is_numeric_dtype(at):
        at = pd.to_datetime(at, utc=True).astype("datetime64[ns, UTC]").astype("int64") / 1e9
    samples = samples.assign(seconds=at - at.min()).sort_values("seconds")
    for kind, line, columns in _SAMPLED:
        if not all(name in samples and finite(samples[name]).size for name in columns):
            continue
        known = samples[samples[line].notna()]
        for column, title in columns.items():
            scale = 2**30 if column.endswith("_bytes") else 1
            # separate lines per run and attempt: a common one would lead from each to the next
            runs = [name for name in (line, "trial_id", "attempt") if name in known]
            drawn = []
            for key, own in known.groupby(runs, sort=False):
                name = f"worker {key[0]}" if line == "rank" else str(key[0])[:12]
                own = own.dropna(subset=column)
                x, y = own["seconds"].to_numpy(float), own[column].to_numpy(float) / scale
                if len(own):
                    drawn.append(Line(name, thinned(x), thinned(y)))
            figure = charts.lines(drawn, "time, s", title, from_zero=True)
            warm = known["warmup"].astype(bool) if "warmup" in known else known[column].isna()
            steady = finite(known.loc[~warm, column])
            mean = float((steady if steady.size else finite(known[column])).mean())
            peak = float(finite(known[column]).max())
            text = f"Mean {cell('util', mean)}." if scale == 1 else f"Peak {bytes_text(peak)}."
            yield Plot(f"{kind}-{column}-{stage}", f"{title}: {stage}", text, figure)
        return
