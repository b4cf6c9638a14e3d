"""Sections of studies: search, race, matrix and sweep. Their points are rows of tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.levels import nested
from raypipe.config.matrix import point_text, text_value
from raypipe.config.yaml_text import dump_yaml
from raypipe.report import plots
from raypipe.report.formatting import cell, counted, heading, listed, number
from raypipe.report.parts import Code, Fold, Part, Section, TableView, cells, own_columns
from raypipe.report.plots import Line, Plot, rows
from raypipe.report.results import (
    SPEED,
    Results,
    RunResults,
    Searched,
    Swept,
    as_numbers,
    count_points,
    plain,
    point_label,
    value_label,
)
from raypipe.report.tables import number_plots, result_parts
from raypipe.report.trainings import step_lines, step_plot, trials_view
from raypipe.store.tables import Column, Table

_MOST_SNIPPETS = 5
#: tables of a comparison, and their captions
_COMPARED = {
    "variant_metrics": "Means over seeds; unmatched numbers have no counterpart at another value",
    "variant_tests": "Paired tests, at the points that both values have",
}
_WORDS = {"out_of_memory": "OOM", "interrupted": "stopped", "succeeded": ""}


def configuration(title: str, point: Mapping[str, Any]) -> Fold:
    """Return the values of a point by dotted key as a part of a configuration, to paste."""
    return Fold(f"Configuration of {title}", [Code(dump_yaml(nested(point)))])


def search_section(search: Searched | None) -> Section:
    """Return the way to the best points of a search, the best points, and their YAML."""
    if search is None:
        return Section("Search", [])
    states = search.points["status"].where(search.points["status"] != "succeeded")
    broken = (search.points["status"] == "succeeded") & ~search.points["feasible"].astype(bool)
    counts = states.mask(broken, "break a condition").value_counts()
    text = ", ".join(f"{count} {state}" for state, count in counts.items())
    text = f"{counted(len(search.points), 'point')} proposed{f' ({text})' if text else ''}."
    if broken.any() and search.front.empty:
        text += " No point meets the conditions."
    parts: list[Part] = [text]
    if len(search.measured) > 1 and len(search.front):
        parts += [*_search_plots(search), *result_parts(search.results)]
    for row in search.front.head(_MOST_SNIPPETS).to_dict("records"):
        values = [f"{name} {number(float(row[name]))}" for name in (m.name for m in search.metrics)]
        title = f"point {row['number'] + 1}: {', '.join(values)}"
        parts.append(configuration(title, json.loads(row["point"])))
    return Section("Search", parts)


def _search_plots(search: Searched) -> list[Plot]:
    """Draw the front by two metrics; by one the points as they ended, with the best so far.

    The best and the front are of points that meet all conditions.
    """
    points = search.measured.sort_values("ended", kind="stable")
    metric, *others = search.metrics
    if others:
        return _front("search-front", search.results.rows, search.keys, (metric, others[0]))
    values = as_numbers(points[metric.name])
    allowed = values.where(points["feasible"].astype(bool))
    best = (allowed.cummin() if metric.better == "lower" else allowed.cummax()).ffill()
    x, y, raw = (part.to_numpy(float) for part in (points["ended"] + 1, best, values))
    line, xlabel = Line("", x, y, raw=raw), "points that ended"
    figure = plots.lines([line], xlabel, metric.name, better=metric.better, from_0=False)
    value = cell(metric.name, search.front[metric.name].iloc[0])
    title = f"Point {search.front['number'].iloc[0] + 1} is the best: {value}"
    if (ties := search.front["point"].nunique()) > 1:
        title = f"{ties} points are equally good: {value}"
    caption = f"{len(points)} measurements of {counted(len(search.points), 'point')} (thin), and "
    caption += f"the best so far that meets all conditions; {metric.better} is better."
    return [Plot("search-progress", title, caption, figure)]


def _front(
    name: str,
    table: pd.DataFrame,
    axes: Sequence[str],
    numbers: tuple[Column, Column],
    chosen: str = "",
) -> list[Plot]:
    """Draw the points of a table by two numbers, with those that no other one dominates."""
    measured = table[[each.name for each in numbers]].apply(as_numbers)
    values = measured[np.isfinite(measured).all(axis=1)]
    if len(values.drop_duplicates()) < 2:
        return []
    points = table.loc[values.index]
    tips = [point_label({axis: row[axis] for axis in axes}) for row in points.to_dict("records")]
    trials = list(points.get("trial_id", points.index))
    place = trials.index(chosen) if chosen in trials else -1
    figure = plots.front(pd.DataFrame(values), [each.better for each in numbers], tips, place)
    caption = f"{counted(len(values), 'point')}. The line joins those that no other dominates."
    title = " and ".join(heading(each.name) for each in numbers)
    return [Plot(name, title, caption, figure)]


def race_section(race: pd.DataFrame | None) -> Section:
    """Return the verdict, the last state of each point, and the configuration of the winner."""
    if race is None:
        return Section("Race", [])
    last = race.sort_values("round", kind="stable").groupby("point", sort=False).tail(1)
    last = last.sort_values("round", ascending=False, kind="stable")
    winners, rounds = last[last["status"] == "winner"], int(race["round"].max())
    runs = int(last["runs"].iloc[0])
    text = f"{len(last)} points, {counted(rounds, 'round')}, up to {counted(runs, 'seed')}."
    if winners.empty:
        left = int((last["status"] == "contender").sum())
        text += f" Undecided between {left} points."
    names = {point: point_text(json.loads(point)) for point in last["point"]}
    for point, mean in zip(winners["point"], winners["mean"], strict=True):
        text += f" {names[point]} wins with a mean of {number(float(mean))}."
    shown = last.assign(point=cells(Code(names[point]) for point in last["point"]))
    shown = shown.rename(columns={"round": "last_round"})
    columns, is_winner = own_columns(shown, ["point"]), list(last["status"] == "winner")
    view = TableView(shown, columns, "Points of the race", is_winner)
    folds = [configuration("the winner", json.loads(point)) for point in winners["point"]]
    return Section("Race", [text, view, *folds])


def variants_section(run: RunResults, shown: Mapping[str, str] | None) -> Section:
    """Return the comparison of the variants of a matrix: means, paired tests and best points.

    ``shown`` is the point of the experiment's own sections. The trainings of each stage are
    compared here; other tables have sections.
    """
    if not run.varied:
        return Section("Variants", [])
    count, seeds = (count_points(run.tables, seeds=seeds) for seeds in (False, True))
    text = f"{counted(count, 'point')}, {counted(seeds, 'seed')}."
    if shown:
        name = ",".join(f"{key}={value}" for key, value in sorted(shown.items()))
        text += f" The experiment's own sections show the point {name}; "
        text += "raypipe report RUN_DIR --variant POINT shows another one."
    search = Searched.of(run.tables)
    searched = search.keys if search is not None else ()  # compared in the section of the search
    parts: list[Part] = [text]
    parts += [plot for of in run.trained for c in of.table.columns for plot in number_plots(of, c)]
    for compared, title in _COMPARED.items():
        table = run.tables.get(compared, pd.DataFrame())
        if "axis" in table:
            table = table[~table["axis"].isin(searched)]
        parts.append(TableView(table, label=title, caption=title))
    for best in run.headlines if search is None else ():
        point = {
            key: text_value(text)
            for key, value in best.ranking[0].values.items()
            for text in run.varied.get(key, ())
            if value in (text, text_value(text))
        }
        if point and best.ties < len(best.points):
            parts.append(configuration(f"the best {best.label_of_metric}", point))
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
    return _front(f"sweep-{sweep.stage}-front", trials, sweep.axes, (x, SPEED), sweep.chosen)


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
