"""Plots of training runs of any experiment: loss, learning rate, throughput, GPU or CPU use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raypipe.hardware import bytes_text
from raypipe.report import plots
from raypipe.report.formatting import cell, number, short_labels
from raypipe.report.marks import toggle
from raypipe.report.plots import Plot, Stroke, finite
from raypipe.report.sweep_trials import SWEEP
from raypipe.report.table_shape import point_label

_MAX_LABELS = 8
_LONGEST = 20  # characters of a trial's name


def training_plots(tables: Mapping[str, pd.DataFrame]) -> list[Plot]:
    """Draw loss, learning rate and speed by step, and the use of the hardware by time.

    Each stage has its own plots. The use is that of the GPUs, or of the CPUs if no sample is of a
    GPU. Reads ``steps``, ``gpu_samples`` and, for the stages, ``trials``. A sweep's trials have
    other plots.
    """
    drawn: list[Plot] = []
    with plots.style():
        steps = plots.rows(tables, "steps")
        if steps is not None:
            stages = list(_by_stage(steps, tables))
            drawn += [_loss(*stage) for stage in stages if finite(stage[1]["loss"]).size]
            drawn += [_rate(*stage) for stage in stages if _varies(stage[1], "lr")]
            drawn += [_speed(*stage) for stage in stages if finite(stage[1]["samples_per_s"]).size]
        samples = plots.rows(tables, "gpu_samples")
        if samples is not None:
            for stage in _by_stage(samples, tables):
                drawn += _use(*stage)
    return drawn


def _by_stage(
    table: pd.DataFrame, tables: Mapping[str, pd.DataFrame]
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the rows of each stage, which a table without that column has from ``trials``."""
    if "stage" not in table.columns:
        trials = plots.rows(tables, "trials")
        stages = {} if trials is None else trials.set_index("trial_id")["stage"].to_dict()
        table = table.assign(stage=[stages.get(name, "training") for name in table["trial_id"]])
    for stage, group in table[table["stage"] != SWEEP].groupby("stage", sort=False):
        yield str(stage), group


def running_median(series: pd.Series[float]) -> pd.Series[float]:
    """Return the centered running median over a thirtieth of the points, which keeps jumps."""
    window = max(1, len(series) // 30) | 1
    return series.rolling(window, center=True, min_periods=1).median()


def _draw_lines(axes: Axes, table: pd.DataFrame, column: str, *, from_zero: bool) -> int:
    """Draw a raw and a smoothed line per trial; return the number of trials.

    More trials than can be distinguished share one color, and only the lowest end is named.
    """
    trials = [(str(name), trial) for name, trial in table.groupby("trial_id", sort=False)]
    few = len(trials) <= _MAX_LABELS
    palette = list(plots.strokes([str(i) for i in range(_MAX_LABELS)]).values())
    single = Stroke(palette[3].color, "-")
    ends: list[tuple[float, str, Stroke]] = []
    labels, _ = short_names([name for name, _ in trials])
    for i, (name, trial) in enumerate(trials):
        known = trial[np.isfinite(trial[column].astype(float))].sort_values("step")
        if known.empty:
            continue
        stroke = palette[i] if few and len(trials) > 1 else single
        drawn = len(axes.lines)
        smooth = running_median(known[column].astype(float))
        if few and len(known) >= 30:
            axes.plot(known["step"], known[column], color=stroke.color, linewidth=0.6, alpha=0.35)
        axes.plot(
            known["step"], smooth, color=stroke.color, linestyle=stroke.line, label=name,
            linewidth=1.7 if few else 0.9, alpha=1.0 if few else 0.6,
        )  # fmt: skip
        if few and len(trials) > 1:
            for line in axes.lines[drawn:]:
                toggle(line, labels[name])
        ends.append((float(smooth.iloc[-1]), labels[name], stroke))
    plots.frame_y(axes, _without_outliers(axes), np.inf if from_zero else 10.0)
    if from_zero:
        axes.set_ylim(bottom=0)
    if len(ends) > 1:
        plots.label_lines(axes, ends if few else [min(ends)])
    return len(ends)


def _without_outliers(axes: Axes) -> np.ndarray:
    """Return the drawn values without the outermost hundredth, which would flatten the rest."""
    known = finite(np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines]))
    low, high = np.quantile(known, [0.005, 0.995])
    return known[(known >= low) & (known <= high)] if known.size > 200 else known


def _step_axes(table: pd.DataFrame) -> tuple[Figure, Axes]:
    figure, axes = plots.new_axes(0.6 if table["trial_id"].nunique() > 1 else 0.84)
    plots.frame_steps(axes, float(table["step"].max()))
    return figure, axes


def _mark_phases(axes: Axes, table: pd.DataFrame) -> None:
    """Mark the beginning of each further phase of the training with a line and its name."""
    if "phase" not in table.columns:
        return
    starts = table.groupby("phase", sort=False)["step"].min().iloc[1:]
    for phase, step in starts.items():
        axes.axvline(step, color="0.6", linewidth=0.8, linestyle=":")
        at = (step, 0.97)
        axes.annotate(
            f" {str(phase).replace('_', ' ')}", at, xycoords=axes.get_xaxis_transform(), va="top"
        )


def _loss(stage: str, table: pd.DataFrame) -> Plot:
    figure, axes = _step_axes(table)
    count = _draw_lines(axes, table, "loss", from_zero=False)
    _mark_phases(axes, table)
    logarithmic = axes.get_yscale() == "log"
    axes.set_title("training loss" + (" (logarithmic)" if logarithmic else ""))
    last = table.sort_values("step").groupby("trial_id", sort=False)["loss"].last()
    end = f"{count} runs" if count > 1 else f"final loss {number(float(last.iloc[0]))}"
    _, note = short_names(list(map(str, table["trial_id"].unique())))
    few = table["trial_id"].nunique() <= _MAX_LABELS
    caption = f"Logged loss (thin) and its running median, {end}.{note if few else ''}"
    return Plot(f"loss-{stage}", f"Training loss: {stage}", caption, figure)


def _rate(stage: str, table: pd.DataFrame) -> Plot:
    """Draw the learning rate; equal schedules lie on each other."""
    figure, axes = _step_axes(table)
    _draw_lines(axes, table.assign(lr=table["lr"].astype(float)), "lr", from_zero=True)
    _mark_phases(axes, table)
    axes.set_title("learning rate")
    values = finite(table["lr"])
    caption = f"Peak {number(float(values.max()))}, at the end "
    last = table.sort_values("step")["lr"].dropna()
    caption += f"{number(float(last.iloc[-1]))}."
    return Plot(f"learning_rate-{stage}", f"Learning rate: {stage}", caption, figure)


def short_names(trials: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return short names of trials by what tells them apart, and a sentence that explains them.

    Names of several keys are the values alone where the keys have no room.
    """
    parts = {name: _values(name) for name in trials}
    keys = dict.fromkeys(key for values in parts.values() for key in values)
    varied = [k for k in keys if len({values.get(k) for values in parts.values()}) > 1]
    own = {name: {k: v for k, v in values.items() if k in varied} for name, values in parts.items()}
    found = {name: point_label(values) or name for name, values in own.items()}
    note = ""
    if max(map(len, found.values()), default=0) > _LONGEST and any(varied):
        found = {name: ", ".join(values.values()) or name for name, values in own.items()}
        named = [key.rpartition(".")[2] or "stage" for key in varied]
        note = f" Runs are named by {', '.join(named)}."
    return dict(zip(found, short_labels(list(found.values()), _LONGEST), strict=True)), note


def _values(trial: str) -> dict[str, str]:
    """Return the values that a trial_id names: ``train@model.layers=2,seed=1``."""
    stage, _, variant = trial.partition("@")
    values = dict(part.partition("=")[::2] for part in variant.split(",")) if variant else {}
    return {"": stage, **values}


def _speed(stage: str, table: pd.DataFrame) -> Plot:
    figure, axes = _step_axes(table)
    _draw_lines(axes, table, "samples_per_s", from_zero=True)
    _mark_phases(axes, table)
    axes.set_title("samples per second")
    median = number(float(np.median(finite(table["samples_per_s"]))))
    caption = f"Training speed at each logged step; the median is {median} samples per second."
    return Plot(f"throughput-{stage}", f"Throughput: {stage}", caption, figure)


def _use(stage: str, table: pd.DataFrame) -> list[Plot]:
    """Draw the use of the GPUs, or of the CPUs if no GPU was measured."""
    if _is_measured(table, "util", "memory_bytes"):
        table = table[table["gpu_uuid"].notna()]
        figure, count = _over_time(table, "gpu_uuid", "util", "memory_bytes")
        figure.axes[0].set(title="utilization, %", ylim=(0, 100))
        figure.axes[1].set_title("memory, GiB")
        start = f"{count} GPUs; mean" if count > 1 else "Mean"
        mean, peak = _mean_and_peak(table, "util", "memory_bytes")
        caption = f"{start} utilization {mean}, peak memory {peak} (NVML samples)."
        return [Plot(f"gpu-{stage}", f"GPU use: {stage}", caption, figure)]
    if _is_measured(table, "cpu_util", "rss_bytes"):
        figure, count = _over_time(table, "rank", "cpu_util", "rss_bytes")
        figure.axes[0].set_title("CPU, % of one core")
        figure.axes[1].set_title("resident memory, GiB")
        start = f"{count} workers, each" if count > 1 else "A worker"
        mean, peak = _mean_and_peak(table, "cpu_util", "rss_bytes")
        caption = f"{start} with its loader: mean use {mean} of one core, peak memory {peak}."
        return [Plot(f"cpu-{stage}", f"CPU use: {stage}", caption, figure)]
    return []


def _is_measured(table: pd.DataFrame, *columns: str) -> bool:
    return all(name in table.columns and finite(table[name]).size for name in columns)


def _varies(table: pd.DataFrame, column: str) -> bool:
    return _is_measured(table, column) and np.unique(finite(table[column])).size > 1


def _mean_and_peak(table: pd.DataFrame, use: str, memory: str) -> tuple[str, str]:
    """Return the mean use after the warm-up, if there are such samples, and the peak of all."""
    steady = table[~table["warmup"].astype(bool)] if "warmup" in table.columns else table
    values = finite(steady[use])
    mean = float((values if values.size else finite(table[use])).mean())
    return cell("util", mean), bytes_text(float(finite(table[memory]).max()))


def _over_time(table: pd.DataFrame, line: str, use: str, memory: str) -> tuple[Figure, int]:
    """Draw use and memory since the stage's first sample, a color per value of the column ``line``.

    Return the number of these values, too.
    """
    at = table["at"]
    if not pd.api.types.is_numeric_dtype(at):
        at = pd.to_datetime(at, utc=True).astype("datetime64[ns, UTC]").astype("int64") / 1e9
    table = table.assign(_seconds=at - at.min()).sort_values("_seconds")
    names = sorted(table[line].unique())
    several = 1 < len(names) <= _MAX_LABELS
    palette = plots.strokes([str(i) for i in range(_MAX_LABELS)])
    figure = Figure(figsize=(plots.WIDTH, plots.HEIGHT))
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(0.115, 0.135, 0.78 if several else 0.97, 0.915, hspace=0.38)
    ends: list[tuple[float, str, Stroke]] = []
    for i, name in enumerate(names):
        stroke = palette[str(3 if len(names) == 1 else i % _MAX_LABELS)]
        own = table[table[line] == name]
        # separate lines per run and attempt: a common one would lead from each to the next
        runs = [column for column in ("trial_id", "attempt") if column in table.columns]
        for _, samples in own.groupby(runs, sort=False):
            seconds, gibibytes = samples["_seconds"], samples[memory].astype(float) / 2**30
            upper.plot(seconds, samples[use].astype(float), color=stroke.color, linewidth=1.0)
            lower.plot(seconds, gibibytes, color=stroke.color, linestyle=stroke.line)
        text = f"worker {name}" if line == "rank" else str(name)[:12]
        ends.append((float(own[memory].iloc[-1]) / 2**30, text, stroke))
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
    lower.set_xlim(left=0)
    lower.set_xlabel("time, s")
    if several:
        plots.label_lines(lower, ends)
    return figure, len(names)
