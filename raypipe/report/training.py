"""Figures of training runs, for any experiment: loss, throughput, GPU or CPU use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter

from raypipe.report import formatting as values
from raypipe.report.plots import (
    HEIGHT,
    WIDTH,
    Figure,
    Stroke,
    finite,
    frame_y,
    label_lines,
    rows,
    strokes,
    style,
)
from raypipe.report.sweep_trials import SWEEP

_MOST_LABELS = 8


def training_figures(tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """Loss and throughput by step, use of the hardware over time: one figure each a stage.

    The use is that of the GPUs, or of the CPU where no sample is of a GPU. Reads ``steps``,
    ``gpu_samples`` and, to know the stage of a trial, ``trials``.
    """
    drawn: list[Figure] = []
    with style():
        steps = rows(tables, "steps", ["trial_id", "step", "loss", "samples_per_s"])
        if steps is not None:
            steps = _own(steps, tables)
            for column, draw in (("loss", _loss), ("samples_per_s", _throughput)):
                for stage, table in steps.groupby("stage", sort=False):
                    if finite(table[column]).size:
                        drawn.append(draw(str(stage), table))
        samples = rows(tables, "gpu_samples", ["trial_id", "gpu_uuid", "at"])
        if samples is not None:
            for stage, table in _own(samples, tables).groupby("stage", sort=False):
                drawn.extend(_use(str(stage), table))
    return drawn


def _own(table: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows of the stages' own runs: the trials of a sweep have figures of their own."""
    table = _with_stage(table, tables)
    return table[table["stage"] != SWEEP]


def _with_stage(table: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The table with the stage of each trial; its own ``stage`` column, if any, stays."""
    if "stage" in table.columns:
        return table
    trials = rows(tables, "trials", ["trial_id", "stage"])
    if trials is None:
        return table.assign(stage="training")
    stages = trials.drop_duplicates("trial_id").set_index("trial_id")["stage"]
    return table.assign(stage=table["trial_id"].map(stages).fillna("training"))


def running_median(series: pd.Series[float]) -> pd.Series[float]:
    """Centred running median over a thirtieth of the points: it keeps the jump of a new phase."""
    window = max(1, len(series) // 30) | 1
    return series.rolling(window, center=True, min_periods=1).median()


def _lines(axes: Axes, table: pd.DataFrame, column: str) -> int:
    """One raw and one smoothed line a trial; returns how many trials were drawn.

    More trials than can be told apart share one colour, and only the lowest end is named.
    """
    trials = [(str(name), rows_) for name, rows_ in table.groupby("trial_id", sort=False)]
    few = len(trials) <= _MOST_LABELS
    palette = list(strokes([str(i) for i in range(_MOST_LABELS)]).values())
    first = Stroke(palette[3].colour, "-")
    ends: list[tuple[float, str, Stroke]] = []
    for i, (name, trial) in enumerate(trials):
        known = trial[np.isfinite(trial[column].astype(float))].sort_values("step")
        if known.empty:
            continue
        stroke = first if len(trials) == 1 or not few else palette[i]
        smooth = running_median(known[column].astype(float))
        width = 1.7 if few else 0.9
        if few and len(known) >= 30:
            axes.plot(known["step"], known[column], color=stroke.colour, linewidth=0.6, alpha=0.35)
        axes.plot(
            known["step"],
            smooth,
            color=stroke.colour,
            linestyle=stroke.line,
            linewidth=width,
            alpha=1.0 if few else 0.6,
            label=name,
        )
        ends.append((float(smooth.iloc[-1]), name, stroke))
    frame_y(axes, _shown(axes))
    if len(ends) > 1:
        label_lines(axes, ends if few else [min(ends)])
    return len(ends)


def _shown(axes: Axes) -> np.ndarray:
    """The drawn values without the outermost hundredth, which would flatten the rest."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    known = finite(drawn)
    low, high = np.quantile(known, [0.005, 0.995])
    return known[(known >= low) & (known <= high)] if known.size > 200 else known


def _step_axes(table: pd.DataFrame) -> tuple[Canvas, Axes]:
    figure = Canvas(figsize=(WIDTH, HEIGHT))
    named = table["trial_id"].nunique() > 1
    axes = figure.add_axes((0.115, 0.135, 0.6 if named else 0.84, 0.78))
    axes.set_xlabel("optimiser step")
    axes.set_xlim(0, max(1, float(table["step"].max())))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: values.number(round(value, 6))))
    return figure, axes


def _mark_phases(axes: Axes, table: pd.DataFrame) -> None:
    """A rule with its name where a further phase of the training begins."""
    if "phase" not in table.columns:
        return
    starts = table.groupby("phase", sort=False)["step"].min().iloc[1:]
    for phase, step in starts.items():
        axes.axvline(step, color="0.6", linewidth=0.8, linestyle=":")
        at = (step, 0.97)
        axes.annotate(
            f" {str(phase).replace('_', ' ')}", at, xycoords=axes.get_xaxis_transform(), va="top"
        )


def _loss(stage: str, table: pd.DataFrame) -> Figure:
    figure, axes = _step_axes(table)
    count = _lines(axes, table, "loss")
    _mark_phases(axes, table)
    logarithmic = axes.get_yscale() == "log"
    axes.set_title("training loss" + (" (logarithmic)" if logarithmic else ""))
    last = table.sort_values("step").groupby("trial_id", sort=False)["loss"].last()
    what = f"{count} runs" if count > 1 else f"final loss {values.number(float(last.iloc[0]))}"
    caption = f"Logged loss (thin) and its running median, {what}."
    return Figure(f"loss-{stage}", f"Training loss: {stage}", caption, figure, "Training")


def _throughput(stage: str, table: pd.DataFrame) -> Figure:
    figure, axes = _step_axes(table)
    _lines(axes, table, "samples_per_s")
    _mark_phases(axes, table)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.set_title("samples per second")
    median = values.number(float(np.median(finite(table["samples_per_s"]))))
    caption = f"Training speed at each logged step; the median is {median} samples a second."
    return Figure(f"throughput-{stage}", f"Throughput: {stage}", caption, figure, "Training")


def _use(stage: str, table: pd.DataFrame) -> Iterator[Figure]:
    if _measured(table, "util", "memory_bytes"):
        gpus = table[table["gpu_uuid"].notna()]
        figure, count = _over_time(gpus, "gpu_uuid", "util", "memory_bytes")
        figure.axes[0].set(title="utilisation, %", ylim=(0, 100))
        figure.axes[1].set_title("memory, GB")
        mean, peak = _mean_and_peak(gpus, "util", "memory_bytes")
        start = f"{count} GPUs; mean" if count > 1 else "Mean"
        caption = f"{start} utilisation {mean}, peak memory {peak} (NVML samples)."
        yield Figure(f"gpu-{stage}", f"GPU use: {stage}", caption, figure, "Training")
    elif _measured(table, "cpu_util", "rss_bytes"):
        figure, count = _over_time(table, "rank", "cpu_util", "rss_bytes")
        figure.axes[0].set_title("CPU, % of one core")
        figure.axes[1].set_title("resident memory, GB")
        mean, peak = _mean_and_peak(table, "cpu_util", "rss_bytes")
        each = f"{count} workers, each" if count > 1 else "A worker"
        caption = f"{each} with its loader: mean use {mean} of one core, peak memory {peak}."
        yield Figure(f"cpu-{stage}", f"CPU use: {stage}", caption, figure, "Training")


def _measured(table: pd.DataFrame, *columns: str) -> bool:
    return all(name in table.columns and finite(table[name]).size for name in columns)


def _mean_and_peak(table: pd.DataFrame, use: str, held: str) -> tuple[str, str]:
    """The mean without the warm-up, if there is anything beside it, and the peak of all."""
    known = finite(table[use])
    if "warmup" in table.columns:
        steady = finite(table.loc[~table["warmup"].astype(bool), use])
        known = steady if steady.size else known
    return values.cell("util", float(known.mean())), values.quantity(
        float(finite(table[held]).max()), "B"
    )


def _over_time(table: pd.DataFrame, line: str, use: str, held: str) -> tuple[Canvas, int]:
    """``use`` above the bytes ``held``, a stroke for each of the values of the column ``line``.

    Time is that since the stage's first sample. Returns how many values there are, too.
    """
    at = table["at"]
    if not pd.api.types.is_numeric_dtype(at):
        at = pd.to_datetime(at, utc=True).astype("datetime64[ns, UTC]").astype("int64") / 1e9
    table = table.assign(_seconds=at - at.min()).sort_values("_seconds")
    names = sorted(table[line].unique())
    few = 1 < len(names) <= _MOST_LABELS
    palette = strokes([str(i) for i in range(_MOST_LABELS)])
    figure = Canvas(figsize=(WIDTH, HEIGHT))
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(0.115, 0.135, 0.78 if few else 0.97, 0.915, hspace=0.38)
    ends: list[tuple[float, str, Stroke]] = []
    for i, name in enumerate(names):
        stroke = palette[str(3 if len(names) == 1 else i % _MOST_LABELS)]
        mine = table[table[line] == name]
        # an attempt or a run has a line of its own, or lines would lead back and forth
        apart = [column for column in ("trial_id", "attempt") if column in table.columns]
        for _, samples in mine.groupby(apart, sort=False):
            seconds, gigabytes = samples["_seconds"], samples[held].astype(float) / 1e9
            upper.plot(seconds, samples[use].astype(float), color=stroke.colour, linewidth=1.0)
            lower.plot(seconds, gigabytes, color=stroke.colour, linestyle=stroke.line)
        text = f"worker {name}" if line == "rank" else str(name)[:12]
        ends.append((float(mine[held].iloc[-1]) / 1e9, text, stroke))
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
    lower.set_xlim(left=0)
    lower.set_xlabel("time, s")
    if few:
        label_lines(lower, ends)
    return figure, len(names)
