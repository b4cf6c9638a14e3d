"""Sections of the report: a table, a search, a race, a matrix, a sweep and training runs.

A table with axes and numbers has the same plots wherever it comes from: calls of a function, a
matrix, a search, a sweep, or trainings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raypipe.config.matrix import point_text, text_value
from raypipe.config.validation import nested
from raypipe.config.yaml_text import dump_yaml
from raypipe.report import plots
from raypipe.report.formatting import (
    cell,
    counted,
    heading,
    listed,
    number,
    with_interval,
    with_unit,
)
from raypipe.report.parts import (
    Code,
    Fold,
    Image,
    Part,
    Pill,
    Section,
    TableView,
    Tile,
    cells,
    own_columns,
)
from raypipe.report.plots import Line, Plot, finite, needs_log, rows, thinned
from raypipe.report.results import (
    PREFIX,
    SPEED,
    SWEEP,
    RunResults,
    Searched,
    Swept,
    held_out_columns,
    staged,
)
from raypipe.report.tables import (
    Headline,
    Means,
    Results,
    as_numbers,
    is_baseline,
    is_number,
    means,
    plain,
    point_label,
    value_label,
)
from raypipe.store.call_files import FILES, RunFile, files_of
from raypipe.store.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST_RANKED = 12  # rows
_MOST_LISTED = 20  # rows without repetitions, which are not folded either
_LONGEST = 120  # characters of a cell
_MOST_CELLS = 24  # of an axis of a heat map
_LARGEST = 1e300  # matplotlib overflows beyond
_LEAST_DOTS = 3  # the headline compares two
_LEAST_PARALLEL, _MOST_PARALLEL = 10, 300  # points; of fewer the best tenth is none
_MOST_UPRIGHT = 7  # axes of points as lines
_MOST_PICTURES = 8  # of the files that calls wrote
_LARGEST_PICTURE = 2**19  # bytes
#: media types of pictures and their first bytes, by the ends of their names
_JPEG = "image/jpeg", b"\xff\xd8\xff"
_PICTURES = {
    ".png": ("image/png", b"\x89PNG\r\n\x1a\n"),
    ".jpg": _JPEG,
    ".jpeg": _JPEG,
    ".svg": ("image/svg+xml", b""),
}
#: tables of a comparison, and their captions
_COMPARED = {
    "variant_metrics": "Means over seeds; unmatched numbers have no counterpart at another value",
    "variant_tests": "Paired tests, at the points that both values have",
}
_WORDS = {"out_of_memory": "OOM", "interrupted": "stopped", "succeeded": ""}


def table_section(results: Results, search: Searched | None = None) -> Section:
    """Return the section of a table: plots, and the first 50 rows.

    Numbers are averaged over repetitions, with Student's 95 % confidence interval. The best values
    come from ``Column.better``; the first screen has them. The section of a search has the numbers
    that it optimizes.
    """
    table, rows, shape = results.table, results.rows, results.shape
    title = heading(table.name).capitalize()
    better = [column for column in shape.numbers if column.better]
    ends = {f"{column.name}_{end}" for column in shape.numbers for end in ("low", "high")}
    varying = [column for column in shape.numbers
               if rows[column.name].nunique() > 1 and column.name not in ends]  # fmt: skip
    drawn = [column for column in (better or varying[:2])
             if search is None or not search.has(table.name, column.name)]  # fmt: skip
    parts: list[Part] = [plot for column in drawn for plot in number_plots(results, column)]
    if len(shape.axes) > 2:  # two are a heat map
        parts += [plot for column in drawn if column in better[:1]
                  for plot in _parallel(results, column)]  # fmt: skip
    parts += [view for column in drawn if column in better[:1]
              for view in best_points(results, column)]  # fmt: skip
    first, caption = rows.head(50).map(_cut), counted(len(rows), "row")
    if table.row:
        caption += f"{', each' if len(rows) > 1 else ':'} {table.row}"
    view = TableView(first, (), title, meanings=table.meanings, caption=caption)
    return Section(title, [*parts, view], covers=(table.name,))


def files_section(run: RunResults) -> Section:
    """Return pictures that calls wrote, those of the best calls first; the calls name all files."""
    calls = next((each for each in run.results if each.table.name == "calls"), None)
    if calls is None or FILES not in calls.rows or run.directory is None:
        return Section("Files", [])
    rows = calls.rows
    for column in [each for each in calls.shape.numbers if each.better][:1]:
        is_rising = column.better == "lower"
        rows = rows.sort_values(column.name, ascending=is_rising, key=as_numbers, kind="stable")
    files = files_of(run.directory, rows)
    pictures = [each for each in files if PurePath(each.name).suffix.lower() in _PICTURES]
    images = filter(None, map(_image, pictures[:_MOST_PICTURES]))
    text = f"{counted(len(files), 'file')}, in files/ of the run directory."
    return Section("Files", [text, *images])


def _image(file: RunFile) -> Image | None:
    """Return the picture in a file; None if it is too large, damaged, lost, or behind a link."""
    media_type, start = _PICTURES[PurePath(file.name).suffix.lower()]
    if file.is_linked:  # nothing from outside of a run is on its page
        return None
    with suppress(OSError), file.open() as stream:
        content = stream.read(_LARGEST_PICTURE + 1)
        if content.startswith(start) and len(content) <= _LARGEST_PICTURE:
            return Image(file.call, file.name, media_type, content)
    return None


def tile(best: Headline) -> Tile:
    """Return a headline as a tile: the value, the point, and the distance to the baseline.

    A point whose lead on the second best one may be chance is not named alone.
    """
    column, second, baseline = best.column, best.second, best.baseline
    notes, tone = [best.leaders] if best.leaders else [], ""
    if best.leaders and best.ties == 1 and second is not None and second.may_be_chance:
        rival = f"{second.label} ({cell(column.name, second.mean)})"
        notes = [f"{best.leaders}, perhaps by chance before {rival}"]
    if baseline is not None:
        rival = f"{baseline.label} ({cell(column.name, baseline.mean)})"
        side = "above" if best.mean > baseline.mean else "below"
        size = with_interval(column.name, abs(best.mean - baseline.mean), baseline.half)
        equal = best.mean == baseline.mean
        notes.append(f"the same as {baseline.label}" if equal else f"{size} {side} {rival}")
        tone = "good" if baseline.gain > 0 and not baseline.may_be_chance else "warn"
    elif best.points > 1:
        notes.append(f"{'lowest' if column.better == 'lower' else 'highest'} of {best.points}")
    value = with_interval(column.name, best.mean, best.half)
    return Tile(best.label, value, "; ".join(notes), tone)


def range_tiles(results: Results) -> list[Tile]:
    """Return the ranges of the first four numbers, of a table that does not say what is better."""
    tiles = []
    for column in results.shape.numbers[:4]:
        values = finite(as_numbers(results.rows[column.name]))
        if values.size:
            ends = dict.fromkeys(cell(column.name, end) for end in (values.min(), values.max()))
            mean = cell(column.name, float(values.mean()))
            note = f"mean {mean} of {values.size} rows" if len(ends) > 1 else ""
            tiles.append(Tile(with_unit(column.name, column.unit, ""), " to ".join(ends), note))
    return tiles


def number_plots(results: Results, column: Column, words: str = "") -> list[Plot]:
    """Draw a number by the axes of its table; none if there is nothing to compare.

    The first two axes give lines over the numeric one if few names are the other one, else a heat
    map without baselines, averaged over further axes; each of these has a separate chart. One
    numeric axis gives a line, other axes give dots. ``words`` is the column that says in a heat map
    why a row has no number; of rows with one the best counts, not the mean.
    """
    rows, axes = results.rows, results.shape.axes
    values = finite(as_numbers(rows[column.name]))
    drawn = [values, *(finite(as_numbers(rows[name])) for name in axes)]
    is_drawable = all(np.abs(each).max(initial=0) <= _LARGEST for each in drawn)
    if not axes or values.size < 2 or not is_drawable:
        return []
    own = results.own
    pair = [name for name in own.shape.axes if own.rows[name].nunique() <= _MOST_CELLS][:2]
    full = math.prod(own.rows[name].nunique() for name in pair)
    if len(pair) < 2 or len(own.rows[pair].drop_duplicates()) < max(3, full / 4):
        return _over(results, column, axes)
    over = [name for name in pair if is_number(rows[name])]
    by = next((name for name in pair if name not in over), pair[0])
    few = rows[by].nunique(dropna=False) <= plots.MOST_LINES and not results.shape.groups
    if len(over) == 1 and few and not words:
        first = _lines(results, column, over[0], by)
    else:
        first = [_heat_map(own, column, words, pair)]
    return [*first, *(p for n in axes if n not in pair for p in _over(results, column, [n]))]


def _heat_map(results: Results, column: Column, words: str, pair: list[str]) -> Plot:
    own = results.rows
    for name in pair:  # a value such as null is one of the compared
        own = own.assign(**{name: own[name].astype(object).where(own[name].notna(), "none")})
    if words:
        order = own.sort_values(column.name, ascending=column.better == "lower", kind="stable")
        own = order.drop_duplicates(pair)
    found = means(own, pair, column.name, results.shape.seeds)
    down, across = (own[name].drop_duplicates().sort_values(key=as_numbers, kind="stable")
                    for name in pair)  # fmt: skip

    def grid(points: pd.DataFrame, values: Any) -> pd.DataFrame:
        cells = points[pair].assign(**{"": values}).pivot(index=pair[0], columns=pair[1], values="")
        labelled = cells.reindex(index=down, columns=across)
        return labelled.rename(index=value_label, columns=value_label)

    texts = grid(own.drop_duplicates(pair), own[words] if words else "").fillna("")
    numbers = grid(found.points, found.mean)
    figure = plots.heat_map(numbers, column.name, column.better, texts)
    figure.axes[0].set(xlabel=_last(pair[1]), ylabel=_last(pair[0]))
    caption = _averaged(results, [], pair, "The best" if words else "Mean")
    caption += " A frame marks the best." if column.better else ""
    return _plot(results, column, pair, caption, figure)


def _over(results: Results, column: Column, axes: Sequence[str]) -> list[Plot]:
    """Draw the means of a number over one numeric axis, or at each point of other axes."""
    shape, rows = results.shape, results.rows
    if len(axes) == 1 and is_number(rows[axes[0]]) and not shape.groups:
        return _lines(results, column, axes[0])
    found = means(rows, [*shape.groups, *axes], column.name, shape.seeds)
    return [_dots(results, column, axes, found)] if len(found.mean) >= _LEAST_DOTS else []


def _lines(results: Results, column: Column, axis: str, by: str = "") -> list[Plot]:
    """Draw the means along a numeric axis, a line for each value of another one, the best ringed.

    Repetitions are dots around their mean. Baselines of an axis that is not drawn are left out of
    the means.
    """
    shown = [axis, by] if by else [axis]
    averaged = [name for name in results.shape.axes if name not in shown]
    contends = ~is_baseline(results.table, results.rows[averaged])
    if contends.any():
        results = replace(results, rows=results.rows[contends])
    rows, seeds = results.rows, results.shape.seeds
    variants = {
        value_label(value) if by else "": (np.unique(finite(as_numbers(own[axis]))), found)
        for value, own in (rows.groupby(by, sort=False, dropna=False) if by else [("", rows)])
        if len((found := means(own, [axis], column.name, seeds)).mean)
    }
    lines = {name: _line(name, axis, every, found) for name, (every, found) in variants.items()}
    without = [name for name, line in lines.items() if not np.isfinite(line.y).any()]
    variants = {name: each for name, each in variants.items() if name not in without}
    drawn = [lines[name] for name in variants]
    if not drawn:
        return []
    figure = plots.lines(drawn, _last(axis), column.name, better=column.better, from_0=False)
    caption = _averaged(results, [found for _, found in variants.values()], shown)
    if without:
        caption += f" Without values over {_last(axis)}: {listed(without)}."
    if any(line.points is not None for line in drawn):
        is_sample = any(len(found.once) > plots.MOST_POINTS for _, found in variants.values())
        caption += f" Dots are {'a sample of the' if is_sample else 'single'} repetitions."
    if any(np.isnan(line.y).any() for line in drawn):
        caption += " The line has a gap, and a cross, where a value is missing or not finite."
    if sum(len(line.x) for line in drawn) < (count := sum(len(x) for x, _ in variants.values())):
        caption += f" {number(count)} points, averaged over neighbors."
    return [_plot(results, column, shown, caption, figure)]


def _line(name: str, axis: str, every: NDArray[np.float64], found: Means) -> Line:
    """Return means as a line over ``every`` value of an axis, with a gap where there is none."""
    at = as_numbers(found.points[axis])
    curve = pd.DataFrame({"y": found.mean, "half": found.half}).set_axis(at)
    curve = curve[curve.index.notna()].reindex(every)
    x, y, half = (thinned(v.to_numpy(float)) for v in (curve.index, curve["y"], curve["half"]))
    once = found.once.assign(x=at.to_numpy()[found.once["point"]])[["x", "value"]].to_numpy()
    if len(once) > plots.MOST_POINTS:  # each is an element of the page
        once = np.random.default_rng(0).choice(once, plots.MOST_POINTS, replace=False)
    return Line(name, x, y, half, points=once if found.half.notna().any() else None)


def _parallel(results: Results, column: Column) -> list[Plot]:
    """Draw parallel coordinates of all axes and a number, the best tenth of the points in color.

    What is as good as its last one is in color, too.
    """
    axes, rows = list(results.shape.axes), results.own.rows
    found = means(rows, axes, column.name, results.shape.seeds)
    values = found.mean[np.abs(found.mean) <= _LARGEST]
    order = values.sort_values(ascending=column.better == "lower", kind="stable")
    count, order = len(order), order.head(_MOST_PARALLEL)
    if count < _LEAST_PARALLEL or order.nunique() < 2:
        return []
    as_last = np.isclose(order, order.iloc[min(count // 10, len(order)) - 1], rtol=1e-12, atol=0)
    best = int(as_last.nonzero()[0][-1]) + 1
    points = found.points.loc[order.index, axes]
    tips = [f"{point_label({axis: row[axis] for axis in axes})}: {cell(column.name, value)}"
            for row, value in zip(points.to_dict("records"), order, strict=True)]  # fmt: skip
    drawn = {name: as_numbers(points[name]) if is_number(points[name])
             else points[name].map(value_label) for name in axes[:_MOST_UPRIGHT]}  # fmt: skip
    figure = plots.parallel(pd.DataFrame({**drawn, column.name: order}), tips, best)
    caption = f"Parallel coordinates of {count} points, the best {best} in color."
    if count > len(order):
        caption += f" The best {len(order)} are drawn."
    if len(axes) > len(drawn):
        caption += f" Without {listed([_last(name) for name in axes[_MOST_UPRIGHT:]])}."
    name = f"{results.table.name}-{column.name}-parallel"
    caption += f" {column.better.capitalize()} is better."
    return [Plot(name, f"{heading(column.name)} at each point", caption, figure)]


def _averaged(
    results: Results, found: Sequence[Means], shown: Sequence[str], what: str = "Mean"
) -> str:
    """Return the first sentence of a caption, which names what is averaged; empty if nothing is."""
    others = [_last(name) for name in results.shape.axes if name not in shown]
    over = [*(["repetitions"] if results.shape.seeds else []), *others]
    has_interval = any(each.half.notna().any() for each in found)
    interval = " with its 95 % interval" if has_interval else ""
    return f"{what} over {listed(over)}{interval}." if over else ""


def _dots(results: Results, column: Column, axes: Sequence[str], found: Means) -> Plot:
    """Draw a dot per point, with its interval and its value; baselines in gray."""
    order = found.mean.sort_values(ascending=column.better != "higher", kind="stable")
    shown = list(order.index[: plots.MOST_DOTS])
    varied = [name for name in map(str, found.points) if found.points[name].nunique() > 1]
    names = [point_label(dict(found.points.loc[place, varied])) for place in shown]
    baseline = is_baseline(results.table, found.points)[shown]
    mean, half = (values[shown].to_numpy(float) for values in (found.mean, found.half))
    figure = plots.dots(names, mean, half, column.name, list(baseline))
    caption = _averaged(results, [found], axes)
    if baseline.any():
        caption += " Gray: baselines."
    if len(order) > len(shown):
        caption += f" The {'first' if not column.better else 'best'} {len(shown)} of {len(order)}."
    return _plot(results, column, axes, caption, figure)


def _plot(
    results: Results, column: Column, by: Sequence[str], caption: str, figure: Figure
) -> Plot:
    title = f"{heading(column.name)} by {listed([_last(str(axis)) for axis in by])}"
    caption += f" {column.better.capitalize()} is better." if column.better else ""
    name = "-".join([results.table.name, column.name, *by])
    return Plot(name, title, caption.strip(), figure)


def _last(key: str) -> str:
    """Return the last part of a dotted key, for readers."""
    return heading(key.rpartition(".")[2])


def best_points(results: Results, column: Column) -> list[TableView]:
    """Return the 16 best points by a number, if many.

    Baselines are left out: each is the same at all points of a matrix. Of few rows without
    repetitions the table itself shows as much.
    """
    shape, own = results.shape, results.own.rows
    rows = results.rows if own.empty else own
    by = [*shape.groups, *shape.axes]
    if not shape.axes or len(results.rows) <= (_LEAST_RANKED if shape.seeds else _MOST_LISTED):
        return []
    found = means(rows, by, column.name, shape.seeds)
    points = found.points.assign(**{column.name: found.mean, "±": found.half})
    if found.runs.nunique() > 1:
        points["repetitions"] = found.runs
    order = points.sort_values(column.name, ascending=column.better == "lower", kind="stable")
    best = order.head(16)
    best = best.assign(**{name: cells(map(value_label, best[name])) for name in by})
    caption = f"The best {len(best)} of {len(order)} points." if len(order) > len(best) else ""
    return [TableView(best, list(best), f"Best points by {heading(column.name)}", caption=caption)]


def _cut(value: Any) -> Any:
    return f"{value[:_LONGEST]}…" if isinstance(value, str) and len(value) > _LONGEST else value


def configuration(title: str, point: Mapping[str, Any]) -> Fold:
    """Return the values of a point by dotted key as a part of a configuration, to paste."""
    return Fold(f"Configuration of {title}", [Code(dump_yaml(nested(point)))])


def search_section(search: Searched | None) -> Section:
    """Return the way to the best points of a search, the best points, and the YAML of five."""
    if search is None:
        return Section("Search", [])
    states = search.points["status"].where(search.points["status"] != "succeeded")
    counts = states.value_counts()
    text = ", ".join(f"{count} {state}" for state, count in counts.items())
    text = f"{counted(len(search.points), 'point')} proposed{f' ({text})' if text else ''}."
    parts: list[Part] = [text]
    if len(search.measured) > 1 and len(search.front):
        parts += _progress(search)
        if len(search.results.shape.axes) > 1:
            parts += _parallel(search.results, search.metrics[0])
        parts += [*_slices(search), *_importance(search)]
        parts += best_points(search.results, search.metrics[0])
    for row in search.front.head(5).to_dict("records"):
        values = [f"{name} {number(float(row[name]))}" for name in (m.name for m in search.metrics)]
        title = f"point {row['number'] + 1}: {', '.join(values)}"
        parts.append(configuration(title, json.loads(row["point"])))
    return Section("Search", parts)


def _progress(search: Searched) -> list[Plot]:
    """Draw the front by two metrics; by one the points as they ended, with the best so far."""
    points = search.measured.sort_values("ended", kind="stable")
    metric, *others = search.metrics
    if others:
        return _scatter("search-front", search.results.rows, search.keys, (metric, others[0]))
    values = as_numbers(points[metric.name])
    best = values.cummin() if metric.better == "lower" else values.cummax()
    x, y, raw = (part.to_numpy(float) for part in (points["ended"] + 1, best, values))
    line, xlabel = Line("", x, y, raw=raw), "points that ended"
    figure = plots.lines([line], xlabel, metric.name, better=metric.better, from_0=False)
    value = cell(metric.name, search.front[metric.name].iloc[0])
    title = f"Point {search.front['number'].iloc[0] + 1} is the best: {value}"
    if (ties := search.front["point"].nunique()) > 1:
        title = f"{ties} points are equally good: {value}"
    caption = f"{len(points)} measurements of {counted(len(search.points), 'point')} (thin), and "
    caption += f"the best so far; {metric.better} is better."
    return [Plot("search-progress", title, caption, figure)]


def _slices(search: Searched) -> Iterator[Plot]:
    """Draw each metric over each searched key, all of which a search varies together."""
    rows, keys = search.results.rows, search.results.shape.axes
    for metric in search.metrics:
        values = as_numbers(rows[metric.name])
        best = values.idxmax() if metric.better == "higher" else values.idxmin()
        for key in keys:
            numbers = (Column(key, "text", ""), metric)
            yield from _scatter(f"search-{metric.name}-{key}", rows, search.keys, numbers, best)


def _importance(search: Searched) -> Iterator[Plot]:
    """Draw how much each key decides whether a point is among the best tenth by a metric.

    Of fewer than 20 points the best tenth is one alone.
    """
    rows, keys = search.results.rows, search.results.shape.axes
    for metric in search.metrics if len(keys) > 1 and len(rows) >= 20 else ():
        shares = key_importance(rows[list(keys)], as_numbers(rows[metric.name]), metric.better)
        title = f"Importance of each key for {heading(metric.name)}"
        caption = "Share in what the best tenth of the points has in common (Optuna's PED-ANOVA)."
        none = np.full(len(shares), np.nan)
        names, values = list(map(_last, shares)), np.round(list(shares.values()), 2)
        figure = plots.dots(names, values, none, "share", [False] * len(shares))
        yield Plot(f"search-importance-{metric.name}", title, caption, figure)


def key_importance(values: pd.DataFrame, metric: pd.Series[float], better: str) -> dict[str, float]:
    """Return the importance of each searched key by Optuna's PED-ANOVA, the largest one first.

    Args:
        values: ``[n, K]``, the values of the keys.
        metric: ``[n]``, finite.
        better: which values of the metric are better.

    """
    from optuna import create_study, create_trial, importance, logging  # slow to import
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    points = values.apply(lambda own: as_numbers(own) if is_number(own) else own.map(str))
    distributions: dict[str, BaseDistribution] = {}
    for key, own in points.items():
        if is_number(own):
            low, high = float(own.min()), float(own.max())
            distributions[str(key)] = FloatDistribution(low, high, log=needs_log(own, 30))
        else:
            distributions[str(key)] = CategoricalDistribution(sorted(own.unique()))
    logging.set_verbosity(logging.ERROR)
    study = create_study(direction="minimize" if better == "lower" else "maximize")
    for value, point in zip(metric, points.to_dict("records"), strict=True):
        params: dict[str, Any] = {str(key): own for key, own in point.items()}
        study.add_trial(create_trial(params=params, distributions=distributions, value=value))
    evaluator = importance.PedAnovaImportanceEvaluator()
    return importance.get_param_importances(study, evaluator=evaluator)


def _scatter(
    name: str,
    table: pd.DataFrame,
    axes: Sequence[str],
    numbers: tuple[Column, Column],
    chosen: Any = None,
) -> list[Plot]:
    """Draw the points of a table by two columns; that with the label ``chosen`` has a ring.

    Of two numbers that can be better, a line joins those points that no other one dominates.
    """
    x, y = (column.name for column in numbers)
    known = as_numbers(table[y]).to_frame()
    known.insert(0, x, as_numbers(table[x]) if is_number(table[x]) else table[x].map(value_label))
    points = known[~known.isin([np.inf, -np.inf]).any(axis=1)].dropna()
    if len(points.drop_duplicates()) < 2:
        return []
    tips = [point_label({axis: row[axis] for axis in axes})
            for row in table.loc[points.index].to_dict("records")]  # fmt: skip
    place = list(points.index).index(chosen) if chosen in points.index else -1
    better = [column.better for column in numbers]
    figure = plots.scatter(points, better, tips, place, "recommended" if better[0] else "")
    title, text = f"{heading(x)} and {heading(y)}", "The line joins those that no other dominates."
    if not better[0]:
        title, text = f"{heading(y)} by {_last(x)}", "A ring is the best."
        figure.axes[0].set_xlabel(_last(x))
    return [Plot(name, title, f"{counted(len(points), 'point')}. {text}", figure)]


def race_section(race: pd.DataFrame | None) -> Section:
    """Return the verdict, the last state of each point, and the configuration of the winner."""
    if race is None:
        return Section("Race", [])
    last = race.sort_values("round", kind="stable").groupby("point", sort=False).tail(1)
    last = last.sort_values("round", ascending=False, kind="stable")
    winners = last[last["status"] == "winner"]["point"]
    text = f"{len(last)} points, {counted(int(race['round'].max()), 'round')}."
    if winners.empty:
        text += f" Undecided between {(last['status'] == 'contender').sum()} points."
    text += "".join(f" {point_text(json.loads(point))} wins." for point in winners)
    names = cells(Code(point_text(json.loads(point))) for point in last["point"])
    shown = last.assign(point=names).rename(columns={"round": "last_round"})
    is_winner = list(last["status"] == "winner")
    view = TableView(shown, own_columns(shown, ["point"]), "Points of the race", is_winner)
    folds = [configuration("the winner", json.loads(point)) for point in winners]
    return Section("Race", [text, view, *folds])


def variants_section(run: RunResults) -> Section:
    """Return the comparison of the variants of a matrix: means, paired tests and best points.

    The trainings of each stage are compared here; other tables have sections.
    """
    if not run.varied:
        return Section("Variants", [])
    count, seeds = (run.count_points(seeds=seeds) for seeds in (False, True))
    parts: list[Part] = [f"{counted(count, 'point')}, {counted(seeds, 'seed')}."]
    search = run.search
    for of in run.trained:
        drawn = (c for c in of.table.columns if search is None or not search.has("trials", c.name))
        parts += [plot for column in drawn for plot in number_plots(of, column)]
    for compared, title in _COMPARED.items():
        table = run.tables.get(compared, pd.DataFrame())
        if "axis" in table and search is not None:  # its section compares the values of its keys
            table = table[~table["axis"].isin(search.keys)]
        parts.append(TableView(table, label=title, caption=title))
    for best in run.headlines if search is None else ():
        point = {
            key: text_value(text)
            for key, value in best.ranking[0].values.items()
            for text in run.varied.get(key, ())
            if value in (text, text_value(text))
        }
        if point and best.ties < best.points:
            parts.append(configuration(f"the best {best.label_of_metric}", point))
    if search is not None and not any(parts[1:]):
        parts = []  # the section of the search says how many points there are
    return Section("Variants", parts)


def sweep_asked(swept: Sequence[Swept]) -> Iterator[str]:
    """Yield which settings of which stage were tried."""
    for sweep in swept:
        counts = [f"{axis} ({len(sweep.trials[axis].map(repr).unique())} values)"
                  for axis in sweep.axes]  # fmt: skip
        trials = counted(len(sweep.trials), "trial")
        text = f"a sweep for the best {heading(sweep.metric.name)} of {sweep.stage} with {trials}"
        yield ": ".join(filter(None, [text, ", ".join(counts)]))


def sweep_section(run: RunResults) -> Section:
    """Return recommendation, plots and trials of each swept stage."""
    parts: list[Part] = []
    for sweep in run.sweeps:
        if not sweep.chosen:
            parts.append(f"No trial of {sweep.stage} can be recommended.")
        if reason := sweep.recommendation.get("reason"):
            parts.append(f"{sweep.stage}: {reason}")
        if snippet := sweep.recommendation.get("snippet"):
            written = (line for line in snippet.strip().splitlines() if not line.startswith("#"))
            parts.append(Code("\n".join(written)))
        words = sweep.trials["status"].map(lambda status: _WORDS.get(status, status))
        column = sweep.metric if sweep.metric.name in sweep.trials else SPEED
        table = Table(f"sweep-{sweep.stage}", "a trial", (column,), axes=tuple(sweep.axes))
        results = Results(table, plain(sweep.trials.assign(words=words)))
        drawn = number_plots(results, column, "words")
        parts += [*drawn, *_sweep_front(sweep), *_sweep_curves(run, sweep), _trials(run, sweep)]
    return Section("Sweep", parts)


def _sweep_front(sweep: Swept) -> list[Plot]:
    """Draw the speed of every measured trial against its metric, or against its memory."""
    trials, x = sweep.trials[sweep.trials["status"] == "succeeded"], sweep.metric
    if x.name == SPEED.name or x.name not in trials:
        peaks = ("gpu_peak_bytes", "host_peak_bytes")
        name = next((name for name in peaks if trials[name].notna().any()), peaks[0])
        x = Column(name, "real", "", better="lower")
    chosen = next(iter(trials.index[trials["trial_id"] == sweep.chosen]), None)
    return _scatter(f"sweep-{sweep.stage}-front", trials, sweep.axes, (x, SPEED), chosen)


def _sweep_curves(run: RunResults, sweep: Swept) -> Iterator[Plot]:
    """Draw the curve of each trial of a sweep that trains to the end."""
    steps = rows(run.tables, "steps")
    if steps is None or sweep.trials["kind"].ne("quality").all():
        return
    column = sweep.metric.name if sweep.metric.name in steps.columns else "loss"
    trials = sweep.trials.set_index(sweep.trials["trial_id"].astype(str))
    labels = {str(trial): ", ".join(map(value_label, row)) or str(trial)
              for trial, row in trials[list(sweep.axes)].iterrows()}  # fmt: skip
    drawn = step_lines(steps[steps["trial_id"].isin(trials.index)], column, labels)
    if len(drawn) > 1:
        better, stage = sweep.metric.better, f"sweep of {sweep.stage}"
        caption = f"{len(drawn)} trials, named by {listed(sweep.axes)}; {better} is better."
        yield step_plot(stage, column, drawn, "optimizer step", caption, better)


def _trials(run: RunResults, sweep: Swept) -> Fold:
    """Return all trials: the recommended first, then by speed."""
    trials = sweep.trials.assign(chosen=sweep.trials["trial_id"] == sweep.chosen)
    order, ascending = ["chosen", SPEED.name, "status"], [False, False, True]
    trials = trials.sort_values(order, ascending=ascending, kind="stable")
    states = trials["status"].str.replace("_", " ").value_counts()
    view = trials_view(run, trials, f"Trials of {sweep.stage}", sweep.axes)
    view = replace(view, emphasized=list(trials["chosen"]))
    counts = ", ".join(f"{count} {status}" for status, count in states.items())
    return Fold(f"All {len(trials)} trials of {sweep.stage}: {counts}", [view])


def training_section(run: RunResults) -> Section:
    """Return the plots and the trials of training stages; a sweep's trials are in its section."""
    trials = run.tables.get("trials", pd.DataFrame({"stage": [], "status": []}))
    view = trials_view(run, trials[trials["stage"] != SWEEP], "Training runs")
    return Section("Training runs", [*training_plots(run), view])


def trials_view(
    run: RunResults, trials: pd.DataFrame, label: str, first: Sequence[str] = ("trial_id",)
) -> TableView:
    """Return the columns of trials that their table shows, and their held-out metrics."""
    shown = run.core("trials").shown or own_columns(trials)
    ends = [str(name) for name in trials if str(name).startswith(PREFIX)]
    meanings = {name: f"{heading(name)} of the model that is kept" for name in ends}
    meanings = run.core("trials").meanings | meanings
    columns = list(dict.fromkeys([*first, *shown, *ends]))
    trials = trials.assign(status=cells(map(Pill.of_status, trials["status"].astype(str))))
    return TableView(trials, columns, label, meanings=meanings)


def training_plots(run: RunResults) -> Iterator[Plot]:
    """Draw held-out metrics, loss and speed by step, and the use of the hardware by time.

    Each stage has its own plots, of what its tables declare as shown. A sweep's trials have other
    plots.
    """
    for name in ("steps", "gpu_samples"):
        rows, xlabel = staged(run.tables, name), "optimizer step"
        if "at" in rows:
            begun = rows.groupby("stage")["at"].transform("min")
            rows = rows.assign(step=(rows["at"] - begun).dt.total_seconds())
            xlabel = "time, s"
        shown = [Column(column, "real", "") for column in run.core(name).shown if column in rows]
        metrics = held_out_columns(map(str, rows), run.core("trials").columns, run.monitors)
        for column in (*metrics, *shown):
            better, caption = column.better, ""
            if better:
                caption = f"{better.capitalize()} is better; a ring is the best step."
            for stage, own in rows.groupby("stage", sort=False):
                if np.unique(finite(as_numbers(own[column.name]))).size > 1:
                    drawn = step_lines(own, column.name)
                    yield step_plot(str(stage), column.name, drawn, xlabel, caption, better)


def step_plot(
    stage: str, column: str, drawn: Sequence[Line], xlabel: str, caption: str = "", better: str = ""
) -> Plot:
    """Return the plot of a column of a stage."""
    figure, name = plots.lines(drawn, xlabel, column, better=better), heading(column)
    return Plot(f"{column}-{stage}", f"{name[:1].upper()}{name[1:]}: {stage}", caption, figure)


def step_lines(
    rows: pd.DataFrame, column: str, labels: Mapping[str, str] | None = None
) -> list[Line]:
    """Return a line per trial, attempt and worker; of one trial they are named by worker.

    It is the running median over a thirtieth of the points, which keeps jumps; not of evaluations.
    """
    each = "rank" if "rank" in rows and rows["trial_id"].nunique() == 1 else "trial_id"
    rows = rows[np.isfinite(as_numbers(rows[column]))].dropna(subset=each)
    rows = rows.sort_values("step", kind="stable")
    if labels is None and each == "trial_id":
        labels = short_names(list(dict.fromkeys(map(str, rows[each]))))
    names = (each, "trial_id", "rank", "attempt")
    several = dict.fromkeys(name for name in names if name in rows)
    drawn = []
    for (of, *_), own in rows.groupby(list(several)):
        raw = as_numbers(own[column])
        window = 1 if column.startswith(PREFIX) else max(1, len(raw) // 30) | 1
        smooth = raw.rolling(window, center=True, min_periods=1).median()
        x, y, thin = (thinned(values.to_numpy(float)) for values in (own["step"], smooth, raw))
        label = f"worker {of:.0f}" if labels is None else labels[str(of)]
        drawn.append(Line(label, x, y, raw=thin if window > 1 else None))
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
