"""Section of the report on the search of a matrix: its best points, and the way to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from raypipe.config.levels import nested
from raypipe.config.yaml_text import dump_yaml
from raypipe.report import plots
from raypipe.report.comparison import Tables
from raypipe.report.formatting import number
from raypipe.report.headlines import Headline, headlines
from raypipe.report.plots import INK, MUTED, PAPER, Plot, rows
from raypipe.report.sections import Code, Fold, Part, Section, TableView, cells
from raypipe.report.table_shape import plain, shape_of
from raypipe.store.tables import Column, Table

_MOST_SHOWN = 10
_MOST_SNIPPETS = 5
_DIGITS = 4


@dataclass(frozen=True)
class Searched:
    """A search: its points, and whether each metric is minimized or maximized."""

    points: pd.DataFrame
    objectives: Mapping[str, str]

    @classmethod
    def of(cls, tables: Tables) -> Searched | None:
        """Return the search of a run; None if it has none."""
        points = rows(tables, "search")
        if points is None:
            return None
        return cls(points, json.loads(points["objectives"].iloc[0]))

    @property
    def keys(self) -> list[str]:
        """The searched keys."""
        return list(dict.fromkeys(key for text in self.points["point"] for key in json.loads(text)))

    @property
    def best(self) -> pd.DataFrame:
        """The points that meet all conditions and that no other one is better than."""
        return self.points[self.points["on_front"].astype(bool)]

    @property
    def measured(self) -> pd.DataFrame:
        """The points with metrics."""
        return self.points[self.points["status"] == "succeeded"]


def search_headlines(tables: Tables) -> list[Headline]:
    """Return the best point of a search by each of its metrics; it meets all conditions."""
    search = Searched.of(tables)
    if search is None:
        return []
    points = search.measured[search.measured["feasible"].astype(bool)]
    values = [json.loads(text) for text in points["point"]]
    axes = {key: cells(each.get(key) for each in values) for key in search.keys}
    rows = plain(points.drop(columns="number").assign(**axes))
    proposed = [json.loads(text) for text in search.points["point"]]
    first = proposed[0]
    varied = [key for key in axes if any(each.get(key) != first.get(key) for each in proposed)]
    found = []
    for name, mode in search.objectives.items():
        column = Column(name, "real", "", better="lower" if mode == "min" else "higher")
        table = Table("search", "a point", (column,), axes=tuple(axes))
        # also where all points with a number are equal: a point is named, and counts once
        shape = replace(shape_of(table, rows), axes=tuple(varied or axes))
        for best in headlines(table, rows, shape):
            owner, _, rest = name.partition(".")
            shown, _, group = rest.removesuffix(")").partition(" (")
            named = replace(column, name=shown)
            found.append(replace(best, table=owner, column=named, group=group))
    return found


def search_section(tables: Tables) -> Section:
    """Return the best points with their YAML, and the figure of a search."""
    search = Searched.of(tables)
    if search is None:
        return Section("Search", [])
    parts: list[Part] = [_introduction(search)]
    if search.measured.empty:
        return Section("Search", parts)
    with plots.style():
        figure = progress_plot(search) if len(search.objectives) == 1 else front_plot(search)
    if figure is not None:
        parts.append(figure)
    parts.append(_ranking(search))
    best = search.best.sort_values(next(iter(search.objectives)), kind="stable")
    for _, row in best.head(_MOST_SNIPPETS).iterrows():
        text = dump_yaml(nested(json.loads(row["point"])))
        title = f"Configuration of point {row['number'] + 1}: {_metrics(search, row)}"
        parts.append(Fold(title, [Code(text)]))
    return Section("Search", parts)


def progress_plot(search: Searched) -> Plot | None:
    """Draw the metric of each point in the order in which they ended, and the best so far."""
    ((name, mode),) = search.objectives.items()
    measured = search.measured.sort_values("ended", kind="stable")
    if len(measured) < 2:
        return None
    figure, axes = plots.new_axes(height=0.74)
    broken = ~measured["feasible"].astype(bool)
    top, color = measured[~broken], plots.strokes(["point"])["point"].color
    axes.scatter(top["ended"] + 1, top[name], s=18, color=color, edgecolor="none", zorder=2)
    if broken.any():
        group = measured[broken]
        axes.scatter(group["ended"] + 1, group[name], s=16, marker="x", color=MUTED, linewidth=1)
    if len(top):
        best = top[name].cummin() if mode == "min" else top[name].cummax()
        end = float(measured["ended"].max()) + 1
        axes.plot(
            [*(top["ended"] + 1), end], [*best, best.iloc[-1]],
            drawstyle="steps-post", color=INK, linewidth=1.2, zorder=1,
        )  # fmt: skip
    axes.set_xlabel("points that ended")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title(f"{name}, {'lower' if mode == 'min' else 'higher'} is better")
    plots.frame_y(axes, measured[name], ratio=30)
    handles = [Line2D([], [], color=INK, linewidth=1.2, label="best so far")]
    if broken.any():
        handles.append(
            Line2D([], [], marker="x", linestyle="", color=MUTED, markersize=4,
                   label="breaks a condition")
        )  # fmt: skip
    plots.draw_legend(figure, handles)
    caption = f"{len(measured)} measurements of {len(search.points)} points."
    return Plot("search-progress", _title(search), caption, figure)


def front_plot(search: Searched) -> Plot | None:
    """Draw the first two metrics of each point, and the front of those that none dominates."""
    (first, one), (second, other) = list(search.objectives.items())[:2]
    measured = search.measured
    if len(measured) < 2:
        return None
    figure, axes = plots.new_axes(height=0.74)
    on_front = measured["on_front"].astype(bool)
    broken = ~measured["feasible"].astype(bool)
    color = plots.strokes(["point"])["point"].color
    others = measured[~on_front & ~broken]
    axes.scatter(others[first], others[second], s=18, color=color, alpha=0.5, edgecolor="none")
    axes.scatter(
        measured[broken][first], measured[broken][second], s=16, marker="x", color=MUTED,
        linewidth=1,
    )  # fmt: skip
    front = measured[on_front].sort_values(first, kind="stable")
    axes.scatter(front[first], front[second], s=30, color=color, edgecolor=PAPER, zorder=3)
    if len(search.objectives) == 2 and len(front) > 1:
        # a point rules out what is worse in both
        step = "steps-post" if one == "min" else "steps-pre"
        axes.plot(front[first], front[second], drawstyle=step, color=MUTED, linewidth=1.0, zorder=1)
    axes.set_xlabel(f"{first}, {'lower' if one == 'min' else 'higher'} is better")
    axes.set_title(f"{second}, {'lower' if other == 'min' else 'higher'} is better")
    values = measured[first].to_numpy(float)
    if plots.needs_log(values, 30):
        plots.set_log(axes.xaxis, float(values.min()), float(values.max()))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))
        plots.write_numbers(axes.xaxis)
    axes.margins(x=0.06)
    axes.grid(visible=True, axis="x")
    plots.frame_y(axes, measured[second], ratio=30)
    caption = f"{len(measured)} points; large: the {len(front)} that no other one dominates."
    if broken.any():
        caption += f" Crosses: {int(broken.sum())} that break a condition."
    return Plot("search-front", f"The Pareto front has {len(front)} points", caption, figure)


def _introduction(search: Searched) -> str:
    points = search.points
    counts = points["status"].value_counts()
    text = f"{len(points)} points were proposed"
    unmeasured = [name for name in ("running", "failed", "excluded") if name in counts]
    ended = [f"{counts[name]} {name}" for name in unmeasured]
    broken = int((~search.measured["feasible"].astype(bool)).sum())
    if broken:
        ended.append(f"{broken} break a condition")
    return text + (f" ({', '.join(ended)})." if ended else ".")


def _ranking(search: Searched) -> TableView:
    """Return the best points: those of the front, then by the first metric."""
    name, mode = next(iter(search.objectives.items()))
    sign = 1 if mode == "min" else -1
    points = search.measured.assign(
        _order=lambda frame: sign * frame[name], _feasible=search.measured["feasible"].astype(bool)
    )
    by = ["on_front", "_feasible", "_order"]
    points = points.sort_values(by, ascending=[False, False, True], kind="stable")
    points = points.head(max(_MOST_SHOWN, len(search.best)))
    values = [json.loads(text) for text in points["point"]]
    axes = {key: cells(_short(each.get(key)) for each in values) for key in search.keys}
    metrics = [column for column in points.columns if _is_metric(search, str(column))]
    shown = points.assign(point=points["number"] + 1, **axes)
    return TableView(
        shown, ["point", *axes, *metrics], "Best points", list(points["on_front"].astype(bool))
    )


def _is_metric(search: Searched, column: str) -> bool:
    return column in search.objectives or (
        "." in column and pd.api.types.is_float_dtype(search.points[column])
    )


def _metrics(search: Searched, row: pd.Series) -> str:
    return ", ".join(f"{name} {number(float(row[name]))}" for name in search.objectives)


def _title(search: Searched) -> str:
    best = search.best
    if best.empty:
        return "No point meets the conditions"
    (name,) = search.objectives
    value = number(float(best[name].iloc[0]))
    if (ties := best["point"].nunique()) > 1:
        return f"{ties} points are equally good: {value}"
    return f"Point {best['number'].iloc[0] + 1} is the best: {value}"


def _short(value: Any) -> Any:
    """Return a number with few digits; the YAML has all of them."""
    if isinstance(value, float) and np.isfinite(value):
        return f"{value:.{_DIGITS}g}"
    return value if isinstance(value, str) else json.dumps(value)


def best_values(tables: Tables) -> dict[str, Any]:
    """Return the values of the best point of a search; none without a search."""
    search = Searched.of(tables)
    if search is None or search.best.empty:
        return {}
    found: dict[str, Any] = json.loads(search.best["point"].iloc[0])
    return found


def searched_keys(tables: Tables) -> Sequence[str]:
    """Return the keys that a search varied."""
    search = Searched.of(tables)
    return [] if search is None else search.keys
