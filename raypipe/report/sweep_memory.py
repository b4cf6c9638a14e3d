"""Plots of a sweep's memory model: measured peaks and fitted lines by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from raypipe.hardware import bytes_text
from raypipe.report import plots
from raypipe.report.formatting import percent
from raypipe.report.plots import MUTED, PAPER, Plot, Stroke
from raypipe.report.sweep_trials import GROUP, MARKERS, Sweep, ordered, precision_strokes


class _Group(NamedTuple):
    """The trials of one precision and checkpointing setting, their memory fits and their look.

    Trials that accumulate gradients have a separate fit, since they keep gradients between
    micro-batches. Then ``fits`` has several rows, that one first.
    """

    label: str
    stroke: Stroke
    marker: str
    width: float
    trials: pd.DataFrame
    fits: pd.DataFrame


def memory_plots(sweep: Sweep) -> list[Plot]:
    """Draw peak memory by micro-batch: measurements, fitted lines, capacity, failed trials.

    One plot for each setting of compilation, strategy and workers that has at least two
    micro-batches.
    """
    trials = sweep.all_trials
    known = (trials["status"] == "out_of_memory") | trials["peak_bytes"].notna()
    trials = trials[known & trials["micro_batch"].notna() & (trials["precision"] != "")]
    settings: dict[Any, pd.DataFrame] = dict(iter(trials.groupby(list(GROUP[2:]))))
    words = [
        ("compiled" if key[0] else "not compiled", key[1], f"workers: {key[2]:.0f}")
        for key in settings
    ]
    varied = [len(set(column)) > 1 for column in zip(*words, strict=True)]
    drawn = []
    for own, group in zip(words, settings.values(), strict=True):
        setting = ", ".join(word for word, varies in zip(own, varied, strict=True) if varies)
        drawn.append(_draw_setting(sweep, group, setting))
    return [plot for plot in drawn if plot is not None]


def _draw_setting(sweep: Sweep, trials: pd.DataFrame, setting: str) -> Plot | None:
    ran_out = trials["status"] == "out_of_memory"
    if trials[~ran_out]["micro_batch"].nunique() < 2:
        return None
    sizes = np.unique(trials["micro_batch"].to_numpy(float))
    capacity = float(sweep.fits["capacity_bytes"].max())
    unit, unit_name = sweep.memory_unit
    figure, axes = plots.new_axes(0.55)
    _axis(axes, sizes)
    groups = _groups(sweep, trials)
    ends = [_draw(axes, group, sizes, unit) for group in groups]
    values = np.append(trials[~ran_out]["peak_bytes"] / unit, [end for end in ends if end > 0])
    limit = capacity / unit
    if ran_out.any() or limit < 4 * values.max():  # a far capacity would flatten all others
        values = np.append(values, limit)
    plots.frame_y(axes, values)
    caption, title = _words(groups, int(ran_out.sum()))
    top = axes.get_ylim()[1]
    if limit <= top:
        axes.axhline(limit, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.axhspan(limit, top, color=MUTED, alpha=0.08, linewidth=0)
        axes.annotate(f"capacity {bytes_text(capacity)}", (0, limit), (3, 3), fontsize=7.5,
                      xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                      color=MUTED)  # fmt: skip
    elif limit > top:
        caption += f" The capacity, {bytes_text(capacity)}, is far above."
    _crosses(axes, groups, limit if limit <= top else top)
    labels = zip(ends, groups, strict=True)
    plots.label_lines(axes, [(end, g.label, g.stroke) for end, g in labels if np.isfinite(end)])
    axes.set_title(f"peak {'GPU' if sweep.on_gpu else 'host'} memory, {unit_name}")
    name = f"sweep-memory-{sweep.stage}"
    if setting:
        name, title = f"{name}-{setting}", f"{title} ({setting})"
    return Plot(name, title, caption, figure)


def _axis(axes: Axes, sizes: NDArray[np.float64]) -> None:
    """Draw the axis of micro-batches, logarithmic from three octaves on."""
    axes.set_xlabel("micro-batch")
    logarithmic = plots.needs_log(sizes, 7.9)
    axes.set_xscale("log" if logarithmic else "linear")
    places = np.log(sizes) if logarithmic else sizes
    low, high = places[0] - 0.04 * np.ptp(places), places[-1] + 0.04 * np.ptp(places)
    axes.set_xlim(*(np.exp([low, high]) if logarithmic else (low, high)))
    ticks = [-1]  # from the right, those that have room
    for i in range(-2, -len(sizes) - 1, -1):
        if places[ticks[-1]] - places[i] >= np.ptp(places) / 14:
            ticks.append(i)
    axes.set_xticks(sizes[ticks], [f"{size:.0f}" for size in sizes[ticks]])
    axes.xaxis.set_minor_locator(NullLocator())


def _groups(sweep: Sweep, trials: pd.DataFrame) -> list[_Group]:
    """Return the groups in the order of the precisions, those without checkpointing first.

    Precisions often need equal memory: every second one has a thin line, visible on a thick one.
    """
    known = sweep.fits.dropna(subset=["static_bytes", "bytes_per_sample"])
    known = known.sort_values("accumulates", ascending=False, kind="stable")
    fits: dict[Any, pd.DataFrame] = dict(iter(known.groupby(list(GROUP))))
    members: dict[Any, pd.DataFrame] = dict(iter(trials.groupby(list(GROUP))))
    precisions = ordered(key[0] for key in members)
    fixed = precision_strokes(precisions)
    groups = []
    for key in sorted(members, key=lambda key: (precisions.index(key[0]), key[1])):
        precision, checkpointing = key[:2]
        line: Any = (0, (4, 1.5)) if checkpointing else "-"
        groups.append(
            _Group(
                f"{precision}, checkpointing" if checkpointing else precision,
                Stroke(fixed[precision].color, line),
                MARKERS.get(precision, "p"),
                1.2 if precisions.index(precision) % 2 else 2.3,
                members[key],
                fits.get(key, known.iloc[:0]),
            )
        )
    return groups


def _draw(axes: Axes, group: _Group, sizes: NDArray[np.float64], unit: float) -> float:
    """Draw the points and lines of a group; return the last value of its line or its points.

    Lines are faint outside of the measured range.
    """
    color, line = group.stroke
    points = group.trials[group.trials["status"] != "out_of_memory"].sort_values("micro_batch")
    x, y = points["micro_batch"], points["peak_bytes"] / unit
    ends = list(y.iloc[-1:])
    everywhere = np.union1d(np.geomspace(sizes[0], sizes[-1], 100), x)
    inside = (everywhere >= x.min()) & (everywhere <= x.max())
    look: dict[str, Any] = {"color": color, "linestyle": line}
    fits = group.fits[["static_bytes", "bytes_per_sample"]].to_numpy(float)
    for place, (static, slope) in reversed(list(enumerate(fits))):
        width, label = (0.9, "_further") if place else (group.width, group.label)
        peak = (static + slope * everywhere) / unit
        axes.plot(everywhere, peak, linewidth=0.9, alpha=0.4, label="_beyond", **look)
        axes.plot(everywhere[inside], peak[inside], linewidth=width, label=label, **look)
        ends.append(peak[-1])
    axes.scatter(x, y, s=15 * group.width, marker=group.marker, edgecolor=color, linewidth=1.1,
                 facecolor=color if line == "-" else PAPER, zorder=3)  # fmt: skip
    return float(ends[-1]) if ends else np.nan


def _crosses(axes: Axes, groups: Sequence[_Group], limit: float) -> None:
    """Mark trials that ran out of memory at the capacity, side by side if several groups did."""
    colors: dict[float, list[str]] = {}
    for group in groups:
        ran_out = group.trials[group.trials["status"] == "out_of_memory"]
        for size in ran_out["micro_batch"].unique():
            colors.setdefault(size, []).append(group.stroke.color)
    for size, together in colors.items():
        for place, color in enumerate(together):
            points = 8.0 * (place - (len(together) - 1) / 2)
            aside = ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
            axes.plot(size, limit, marker="x", markersize=6, markeredgewidth=2.0, color=color,
                      transform=axes.transData + aside, label="_ran out", clip_on=False,
                      zorder=4)  # fmt: skip


def _words(groups: Sequence[_Group], ran_out: int) -> tuple[str, str]:
    """Return caption and title."""
    caption, title = "Points: measured.", "Peak memory by micro-batch"
    fits = pd.concat([group.fits for group in groups])
    if len(fits):
        caption += " Lines: a constant and an amount per sample of the micro-batch, fitted to the"
        caption += " points of one setting, faint outside of the measured range."
    if any(len(group.fits) > 1 for group in groups):
        caption += " Thin lines of the same color: without accumulation, or of other settings."
    # a line through two points has no error
    exact = fits.reindex(columns=["trials"])["trials"].astype(float) <= 2
    errors = plots.finite(fits.loc[~exact, "largest_error"])
    if errors.size:
        title = f"Peak memory: the fitted lines are at most {percent(errors.max())} off"
    if ran_out:
        caption += f" Crosses: ran out of memory ({ran_out} trial{'s' * (ran_out > 1)})."
    return caption, title
