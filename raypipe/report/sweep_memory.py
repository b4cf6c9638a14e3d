"""Plots of a sweep's memory model: measured peaks and fitted lines by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from raypipe.report.formatting import bytes_text
from raypipe.report.plots import (
    MUTED,
    PAPER,
    Plot,
    Stroke,
    finite,
    frame_y,
    label_lines,
    needs_log,
    new_axes,
)
from raypipe.report.sweep_trials import GROUP, MARKERS, Sweep, ordered, precision_strokes


@dataclass(frozen=True)
class _Group:
    """The trials of one precision and checkpointing setting, and their memory fits.

    Trials that accumulate gradients have a separate fit, since they keep gradients between
    micro-batches. Then ``fits`` has several rows, that one first.
    """

    label: str
    stroke: Stroke
    marker: str
    hollow: bool
    width: float
    trials: pd.DataFrame
    fits: pd.DataFrame

    def peaks(self, sizes: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Return the bytes at each micro-batch by each of the fits."""
        known = self.fits[["static_bytes", "bytes_per_sample"]].to_numpy(float)
        return [static + slope * sizes for static, slope in known]

    @property
    def measured(self) -> pd.DataFrame:
        """The trials with a known peak, by micro-batch."""
        known = self.trials[self.trials["status"] != "out_of_memory"]
        return known.dropna(subset=["peak_bytes"]).sort_values("micro_batch")

    @property
    def ran_out(self) -> pd.DataFrame:
        """The trials that ran out of memory."""
        return self.trials[self.trials["status"] == "out_of_memory"]

    def end(self, size: float) -> float:
        """Return the bytes at a micro-batch by the fit, or without one the last measured peak."""
        fitted = [float(peak[0]) for peak in self.peaks(np.array([size]))]
        return next(iter([*fitted, *self.measured["peak_bytes"].iloc[-1:]]), np.nan)


def memory_plots(sweep: Sweep) -> list[Plot]:
    """Draw peak memory by micro-batch: measurements, fitted lines, capacity, failed trials.

    One plot for each setting of compilation, strategy and workers that has at least two
    micro-batches.
    """
    trials = sweep.all_trials
    trials = trials[trials["micro_batch"].notna() & (trials["precision"] != "")]
    trials = trials[(trials["status"] == "out_of_memory") | trials["peak_bytes"].notna()]
    settings: dict[Any, pd.DataFrame] = dict(iter(trials.groupby(list(GROUP[2:]))))
    varied = [len({key[i] for key in settings}) > 1 for i in range(len(GROUP[2:]))]
    plots = []
    for key, group in settings.items():
        compiled, strategy, workers = key
        words = ["compiled" if compiled else "not compiled", strategy]
        words.append("1 worker" if workers == 1 else f"{workers:.0f} workers")
        setting = ", ".join(compress(words, varied))
        plots.append(_draw_setting(sweep, group, setting))
    return [plot for plot in plots if plot is not None]


def _draw_setting(sweep: Sweep, trials: pd.DataFrame, setting: str) -> Plot | None:
    out = trials["status"] == "out_of_memory"
    measured, ran_out = trials[~out], trials[out]
    if measured["micro_batch"].nunique() < 2:
        return None
    capacity = float(sweep.fits["capacity_bytes"].max())
    sizes = np.unique(trials["micro_batch"].to_numpy(float))
    groups = _groups(sweep, trials)
    unit, unit_name = sweep.memory_unit
    figure, axes = new_axes(0.55)
    _axis(axes, sizes)
    ends = [group.end(sizes[-1]) / unit for group in groups]
    drawn = np.append(measured["peak_bytes"] / unit, [end for end in ends if end > 0])
    limit = capacity / unit
    near = limit < 4 * drawn.max() or not ran_out.empty  # else it would flatten all others
    frame_y(axes, np.append(drawn, limit) if near else drawn)
    top = axes.get_ylim()[1]
    if limit <= top:
        axes.axhline(limit, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.axhspan(limit, top, color=MUTED, alpha=0.08, linewidth=0)
        axes.annotate(f"capacity {bytes_text(capacity)}", (0, limit), (3, 3), fontsize=7.5,
                      xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                      color=MUTED)  # fmt: skip
    for group in groups:
        _draw(axes, group, sizes, unit)
    _crosses(axes, groups, limit if limit <= top else top)
    labels = zip(ends, groups, strict=True)
    label_lines(axes, [(end, g.label, g.stroke) for end, g in labels if np.isfinite(end)])
    axes.set_title(f"peak {'GPU' if sweep.on_gpu else 'host'} memory, {unit_name}")
    caption, title = _words(groups, len(ran_out))
    if limit > top:
        caption += f" The capacity, {bytes_text(capacity)}, is far above."
    name = f"sweep-memory-{sweep.stage}"
    if setting:
        name, title = f"{name}-{setting}", f"{title} ({setting})"
    return Plot(name, title, caption, figure)


def _axis(axes: Axes, sizes: NDArray[np.float64]) -> None:
    """Draw the axis of micro-batches, logarithmic from three octaves on."""
    axes.set_xlabel("micro-batch")
    if needs_log(sizes, 7.9):
        axes.set_xscale("log")
        air = (sizes[-1] / sizes[0]) ** 0.03
        axes.set_xlim(sizes[0] / air, sizes[-1] * air)
        places = np.log(sizes)
    else:
        air = (sizes[-1] - sizes[0]) * 0.04
        axes.set_xlim(sizes[0] - air, sizes[-1] + air)
        places = sizes
    gap = np.ptp(places) / 14
    ticks = [sizes[-1]]
    for size, place in zip(sizes[-2::-1], places[-2::-1], strict=True):
        if places[sizes == ticks[-1]][0] - place >= gap:
            ticks.append(size)
    axes.set_xticks(ticks, [f"{size:.0f}" for size in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _groups(sweep: Sweep, trials: pd.DataFrame) -> list[_Group]:
    """Return the groups in the order of the precisions, those without checkpointing first.

    Precisions often need equal memory: every second one has a thin line, visible on a thick one.
    """
    keys = list(GROUP)
    known = sweep.fits.dropna(subset=["static_bytes", "bytes_per_sample"])
    known = known.sort_values("accumulates", ascending=False, kind="stable")
    fits: dict[Any, pd.DataFrame] = dict(iter(known.groupby(keys)))
    members: dict[Any, pd.DataFrame] = dict(iter(trials.groupby(keys)))
    precisions = ordered(key[0] for key in members)
    fixed = precision_strokes(precisions)
    groups = []
    for key in sorted(members, key=lambda key: (precisions.index(key[0]), key[1])):
        precision, checkpointing = key[0], bool(key[1])
        line: Any = (0, (4, 1.5)) if checkpointing else "-"
        groups.append(
            _Group(
                label=f"{precision}, checkpointing" if checkpointing else precision,
                stroke=Stroke(fixed[precision].color, line),
                marker=MARKERS.get(precision, "p"),
                hollow=checkpointing,
                width=1.2 if precisions.index(precision) % 2 else 2.3,
                trials=members[key],
                fits=fits.get(key, known.iloc[:0]),
            )
        )
    return groups


def _draw(axes: Axes, group: _Group, sizes: NDArray[np.float64], unit: float) -> None:
    """Draw the points and lines of a group; lines are faint outside of the measured range."""
    color, line = group.stroke
    measured = group.measured
    seen = measured["micro_batch"]
    everywhere = np.union1d(np.geomspace(sizes[0], sizes[-1], 100), seen)
    inside = (everywhere >= seen.min()) & (everywhere <= seen.max())
    look: dict[str, Any] = {"color": color, "linestyle": line}
    for place, peak in enumerate(group.peaks(everywhere)):
        width, label = (0.9, "_further") if place else (group.width, group.label)
        axes.plot(everywhere, peak / unit, linewidth=0.9, alpha=0.4, label="_beyond", **look)
        axes.plot(everywhere[inside], peak[inside] / unit, linewidth=width, label=label, **look)
    axes.scatter(measured["micro_batch"], measured["peak_bytes"] / unit, s=15 * group.width,
                 marker=group.marker, facecolor=PAPER if group.hollow else color,
                 edgecolor=color, linewidth=1.1, zorder=3)  # fmt: skip


def _crosses(axes: Axes, groups: Sequence[_Group], limit: float) -> None:
    """Mark trials that ran out of memory at the capacity, side by side if several groups did."""
    failed = [(size, g) for g in groups for size in g.ran_out["micro_batch"].unique()]
    for size in {size for size, _ in failed}:
        there = [group for other, group in failed if other == size]
        for place, group in enumerate(there):
            points = 8.0 * (place - (len(there) - 1) / 2)
            aside = ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
            axes.plot(size, limit, marker="x", markersize=6, markeredgewidth=2.0,
                      color=group.stroke.color, transform=axes.transData + aside,
                      label="_ran out", clip_on=False, zorder=4)  # fmt: skip


def _words(groups: Sequence[_Group], ran_out: int) -> tuple[str, str]:
    """Return caption and title."""
    caption = "Points: measured. "
    title = "Peak memory by micro-batch"
    fits = pd.concat([group.fits for group in groups])
    # a line through two points has no error
    exact = fits.reindex(columns=["trials"])["trials"].astype(float) <= 2
    errors = finite(fits.loc[~exact, "largest_error"])
    if len(fits):
        caption += "Lines: a constant and an amount per sample of the micro-batch, fitted to the"
        caption += " points of one setting, faint outside of the measured range. "
    if any(len(group.fits) > 1 for group in groups):
        caption += "Thin lines of the same color: without accumulation, or of other settings. "
    if errors.size:
        title = f"Peak memory: the fitted lines are at most {100 * errors.max():.2g} % off"
    if ran_out:
        trials = "1 trial" if ran_out == 1 else f"{ran_out} trials"
        caption += f"Crosses: ran out of memory ({trials}). "
    return caption.strip(), title
