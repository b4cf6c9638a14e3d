"""Figures of training runs, for any experiment: loss, throughput, GPU or CPU use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter

from raypipe.report import values
from raypipe.report.figures import (
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

_MOST_LABELS = 8


def training_figures(tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """Loss and throughput by step, use of the hardware over time: one figure each a stage.

    The use is that of the GPUs, or of the CPU where no sample is of a GPU. Reads ``steps``, ``gpu_samples`` and, to know the stage of a trial, ``trials``.
    """
    drawn: list[Figure] = []
    with style():
        steps = rows(tables, "steps", ["trial_id", "step", "loss", "samples_per_s"])
        if steps is not None:
            steps = _with_stage(steps, tables)
            for column, draw in (("loss", _loss), ("samples_per_s", _throughput)):
                for stage, table in steps.groupby("stage", sort=False):
                    if finite(table[column]).size:
                        drawn.append(draw(str(stage), table))
        samples = rows(tables, "gpu_samples", ["trial_id", "gpu_uuid", "at"])
        if samples is not None:
            for stage, table in _with_stage(samples, tables).groupby("stage", sort=False):
                drawn.extend(_use(str(stage), table))
    return drawn


def _with_stage(table: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The table with the stage of each trial; its own ``stage`` column, if any, stays."""
    if "stage" in table.columns:
        return table
    trials = rows(tables, "trials", ["trial_id", "stage"])
    if trials is None:
        return table.assign(stage="training")
    stages = trials.drop_duplicates("trial_id").set_index("trial_id")["stage"]
    return table.assign(stage=table["trial_id"].map(stages).fillna("training"))


def _smooth(series: pd.Series[float]) -> pd.Series[float]:
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
        smooth = _smooth(known[column].astype(float))
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
    axes = figure.add_axes((0.115, 0.135, 0.6 if named else 0.855, 0.78))
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
    at = table["at"]
    if not pd.api.types.is_numeric_dtype(at):
        at = pd.to_datetime(at, utc=True).astype("datetime64[ns, UTC]").astype("int64") / 1e9
    table = table.assign(_seconds=at - at.min()).sort_values("_seconds")
    if _measured(table, "util", "memory_bytes"):
        yield _gpu(stage, table[table["gpu_uuid"].notna()])
    elif _measured(table, "cpu_util", "rss_bytes"):
        yield _cpu(stage, table)


def _measured(table: pd.DataFrame, *columns: str) -> bool:
    return all(name in table.columns and finite(table[name]).size for name in columns)


def _use_axes(upper_title: str, lower_title: str) -> tuple[Canvas, Axes, Axes]:
    figure = Canvas(figsize=(WIDTH, HEIGHT))
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.115, right=0.97, top=0.915, bottom=0.135, hspace=0.38)
    upper.set_title(upper_title)
    lower.set_title(lower_title)
    lower.set_xlabel("time, s")
    return figure, upper, lower


def _gpu(stage: str, table: pd.DataFrame) -> Figure:
    figure, upper, lower = _use_axes("utilisation, %", "memory, GB")
    devices = sorted(table["gpu_uuid"].astype(str).unique())
    palette = strokes(["", "", "", *devices]) if len(devices) == 1 else strokes(devices)
    for uuid, samples in table.groupby("gpu_uuid", sort=True):
        colour = palette[str(uuid)].colour
        seconds = samples["_seconds"]
        upper.plot(seconds, samples["util"], color=colour, linewidth=1.0)
        lower.plot(seconds, samples["memory_bytes"] / 1e9, color=colour, label=str(uuid))
    upper.set_ylim(0, 100)
    lower.set_ylim(bottom=0)
    lower.set_xlim(left=0)
    mean = values.cell("util", float(np.mean(finite(table["util"]))))
    peak = values.quantity(float(np.max(finite(table["memory_bytes"]))), "B")
    count = f"{len(devices)} GPUs; " if len(devices) > 1 else ""
    caption = f"{count}mean utilisation {mean}, peak memory {peak} (NVML samples)."
    name, title = f"gpu-{stage}", f"GPU use: {stage}"
    return Figure(name, title, caption[0].upper() + caption[1:], figure, "Training")


def _cpu(stage: str, table: pd.DataFrame) -> Figure:
    figure, upper, lower = _use_axes("CPU, % of one core", "resident memory, GB")
    ranks = sorted(table["rank"].unique())
    palette = strokes([str(rank) for rank in ranks])
    if len(ranks) == 1:
        palette = {str(ranks[0]): strokes(["", "", "", "-"])["-"]}
    # a line of its own for each training run and attempt, or lines would lead back and forth
    for (rank, *_), samples in table.groupby(["rank", "trial_id", "attempt"], sort=True):
        stroke = palette[str(rank)]
        seconds = samples["_seconds"]
        upper.plot(seconds, samples["cpu_util"], color=stroke.colour, linewidth=1.0)
        lower.plot(seconds, samples["rss_bytes"] / 1e9, color=stroke.colour, label=str(rank))
    upper.set_ylim(bottom=0)
    lower.set_ylim(bottom=0)
    lower.set_xlim(left=0)
    mean = values.cell("util", float(np.mean(finite(table["cpu_util"]))))
    peak = values.quantity(float(np.max(finite(table["rss_bytes"]))), "B")
    count = f"{len(ranks)} workers; " if len(ranks) > 1 else ""
    caption = f"{count}mean use {mean} of one core, peak memory {peak} a worker with its loader."
    name, title = f"cpu-{stage}", f"CPU use: {stage}"
    return Figure(name, title, caption[0].upper() + caption[1:], figure, "Training")
