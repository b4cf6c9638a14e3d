"""Sections of studies: search, race, matrix and sweep. Their points are rows of tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.levels import nested
from raypipe.config.matrix import is_seed, point_text, text_value
from raypipe.config.yaml_text import dump_yaml
from raypipe.report import plots
from raypipe.report.best import (
    Headline,
    Ranked,
    Results,
    Tables,
    as_numbers,
    headlines,
    plain,
    point_label,
    value_label,
)
from raypipe.report.comparison import point_name, points, seeds_of, varied
from raypipe.report.formatting import counted, heading, listed, number
from raypipe.report.measures import PREFIX, REPEATED
from raypipe.report.parts import Code, Fold, Part, Pill, Section, TableView, cells
from raypipe.report.plots import Line, Plot, rows
from raypipe.report.tables import number_plots, result_parts
from raypipe.report.trainings import SWEEP, step_lines
from raypipe.stats import runs_needed
from raypipe.store.tables import ADDED, Column, Table

_MOST_SNIPPETS = 5
_SPEED, _MEMORY = "samples_per_s", "peak_memory_bytes"
_FASTER = Column(_SPEED, "real", "", better="higher")
#: columns of ``sweep_points`` that are not axes
_NOT_AXES = ("trial_id", "run_id", "command_id", "variant", "trained_stage", "kind")
#: tables of a comparison, and their captions
_COMPARED = {
    "best_variants": "Best points by the mean over seeds",
    "variant_metrics": "Means over seeds; unmatched numbers have no counterpart at another value",
    "variant_tests": "Paired tests, at the points that both values have",
}
_WORDS = {"out_of_memory": "OOM", "interrupted": "stopped", "succeeded": ""}


def _direction(mode: str) -> Any:
    return "higher" if mode == "max" else "lower"


def _name(point: str) -> str:
    return point_text(json.loads(point))


def configuration(title: str, point: Mapping[str, Any]) -> Fold:
    """Return the values of a point by dotted key as a part of a configuration, to paste."""
    return Fold(f"Configuration of {title}", [Code(dump_yaml(nested(point)))])


@dataclass(frozen=True)
class Searched:
    """A search: its points with a column per searched key, and its metrics."""

    points: pd.DataFrame
    keys: Sequence[str]
    metrics: Sequence[Column]

    @classmethod
    def of(cls, tables: Tables) -> Searched | None:
        """Return the search of a run; None if it has none."""
        found = rows(tables, "search")
        if found is None:
            return None
        values = [json.loads(text) for text in found["point"]]
        keys = list(dict.fromkeys(key for point in values for key in point))
        columns = {key: cells(point.get(key) for point in values) for key in keys}
        modes = json.loads(found["objectives"].iloc[0])
        metrics = [Column(n, "real", "", better=_direction(mode)) for n, mode in modes.items()]
        columns |= {name: np.nan for name in modes if name not in found}  # nothing was measured
        return cls(plain(found.assign(**columns)), keys, metrics)

    @property
    def measured(self) -> pd.DataFrame:
        """The points with metrics."""
        return self.points[self.points["status"] == "succeeded"]

    @property
    def front(self) -> pd.DataFrame:
        """The points that meet all conditions and that no other one is better than."""
        on_front = self.points[self.points["on_front"].astype(bool)]
        return on_front.sort_values(self.metrics[0].name, kind="stable")

    @property
    def results(self) -> Results:
        """The points that meet all conditions as rows of a table with the metrics."""
        table = Table("search", "a point", tuple(self.metrics), axes=tuple(self.keys))
        feasible = self.measured[self.measured["feasible"].astype(bool)]
        return Results(table, plain(feasible.drop(columns=["number"])))


def search_headlines(tables: Tables) -> list[Headline]:
    """Return the best point of a search by each of its metrics; it meets all conditions."""
    search, found = Searched.of(tables), []
    if search is None:
        return []
    results = search.results
    several = [key for key in search.keys if search.points[key].map(repr).nunique() > 1]
    # also where all points with a number are equal: a point is named, and counts once
    shape = replace(results.shape, axes=tuple(several or search.keys))
    for best in headlines(results.table, results.rows, shape):
        owner, _, rest = best.column.name.partition(".")
        shown, _, group = rest.removesuffix(")").partition(" (")
        column = replace(best.column, name=shown)
        found.append(replace(best, table=owner, column=column, group=group))
    return found


def search_section(tables: Tables) -> Section:
    """Return the way to the best points of a search, the best points, and their YAML."""
    search = Searched.of(tables)
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
        return _front("search-front", search.results.rows, search.keys, metric, others[0])
    values = as_numbers(points[metric.name])
    allowed = values.where(points["feasible"].astype(bool))
    best = (allowed.cummin() if metric.better == "lower" else allowed.cummax()).ffill()
    x, y, raw = (part.to_numpy(float) for part in (points["ended"] + 1, best, values))
    line = Line("", x, y, raw=raw, column=metric.name)
    name, better = metric.name, metric.better
    figure = plots.lines([line], "points that ended", name, better=better, steps=False)
    value, ties = number(float(search.front[name].iloc[0])), search.front["point"].nunique()
    title = f"Point {search.front['number'].iloc[0] + 1} is the best: {value}"
    if ties > 1:
        title = f"{ties} points are equally good: {value}"
    caption = f"{len(points)} measurements of {counted(len(search.points), 'point')} (thin), and "
    caption += f"the best so far that meets all conditions; {better} is better."
    return [Plot("search-progress", title, caption, figure)]


def _front(
    name: str, table: pd.DataFrame, axes: Sequence[str], x: Column, y: Column, chosen: str = ""
) -> list[Plot]:
    """Draw the points of a table by two numbers, with those that no other one dominates."""
    numbers = table[[x.name, y.name]].apply(as_numbers)
    known = numbers[np.isfinite(numbers).all(axis=1)]
    if len(known.drop_duplicates()) < 2:
        return []
    points = table.loc[known.index]
    tips = [point_label({a: row[a] for a in axes}) for row in points.to_dict("records")]
    labels = [f"{heading(each.name)}, {each.better} is better" for each in (x, y)]
    signs = [1 if each.better == "lower" else -1 for each in (x, y)]
    names = list(points.get("trial_id", points.index))
    marked = names.index(chosen) if chosen in names else None
    figure = plots.front(known.to_numpy(float), signs, labels, tips, marked)
    caption = f"{counted(len(known), 'point')}. The line joins those that no other dominates."
    return [Plot(name, f"{heading(x.name)} and {heading(y.name)}", caption, figure)]


def race_section(tables: Tables) -> Section:
    """Return the verdict, the last state of each point, and the configuration of the winner."""
    race = rows(tables, "race")
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
    for point, mean in zip(winners["point"], winners["mean"], strict=True):
        text += f" {_name(point)} wins with a mean of {number(float(mean))}."
    shown = last.assign(point=cells(Code(_name(point)) for point in last["point"]))
    shown = shown.rename(columns={"round": "last_round"})
    columns = ["point", "status", "mean", "runs", "last_round", "p_holm"]
    view = TableView(shown, columns, "Points of the race", list(last["status"] == "winner"))
    folds = [configuration("the winner", json.loads(point)) for point in winners["point"]]
    return Section("Race", [text, view, *folds])


def variants_section(
    tables: Tables, shown: Mapping[str, str] | None, trained: Sequence[Results] = ()
) -> Section:
    """Return the comparison of the variants of a matrix: best points, means and paired tests.

    Args:
        tables: those of a comparison of the variants among them.
        shown: the point of the experiment's own sections.
        trained: the trainings of each stage with a number to compare; other tables have sections.

    """
    if rows(tables, "variants") is None:
        return Section("Variants", [])
    compared = {point_name({k: v for k, v in p.items() if not is_seed(k)}) for p in points(tables)}
    text = f"{counted(len(compared), 'point')}, {counted(max(1, seeds_of(tables)), 'seed')}."
    if shown:
        text += f" The experiment's own sections show the point {point_name(shown)}; "
        text += "raypipe report RUN_DIR --variant POINT shows another one."
    search = Searched.of(tables)
    searched = search.keys if search is not None else ()  # compared in the section of the search
    parts: list[Part] = [text]
    parts += [plot for of in trained for c in of.table.columns for plot in number_plots(of, c)]
    for name, title in _COMPARED.items():
        table = tables.get(name, pd.DataFrame())
        if "axis" in table:
            table = table[~table["axis"].isin(searched)]
        columns = [str(column) for column in table if column not in ADDED]
        parts.append(TableView(table, columns, title, caption=title))
    for best in tables.get("best_variants", pd.DataFrame()).to_dict("records"):
        point = {key: text_value(text) for key, text in json.loads(best["point"]).items()}
        parts.append(configuration(f"the best {best['metric']}", point))
    return Section("Variants", parts)


def seeds_needed(tables: Tables) -> int:
    """Return the seeds with which the paired tests can tell a winner on every axis of a matrix."""
    search = Searched.of(tables)
    left_out = search.keys if search is not None else ()
    counts = [len(v) for k, v in varied(tables).items() if not is_seed(k) and k not in left_out]
    most = max(counts, default=2)
    return runs_needed(most * (most - 1) // 2)


@dataclass(frozen=True)
class Swept:
    """The trials of one swept stage, and the recommended one.

    ``trials`` have a column per axis, its dotted key, and a speed unless the trial failed. Trials
    that were measured again occur once, with the medians. ``recommendation`` is the row of the
    table, empty without one; ``chosen`` the id of its trial.
    """

    stage: str
    axes: Sequence[str]
    trials: pd.DataFrame
    recommendation: Mapping[str, Any]
    metric: Column
    is_quality: bool

    @property
    def chosen(self) -> str:
        """The id of the recommended trial; empty without one."""
        return str(self.recommendation.get("trial_id", ""))

    @property
    def headline(self) -> Headline | None:
        """The recommended point, which need not be the one with the best number."""
        chosen = self.trials[self.trials["trial_id"] == self.chosen]
        value = float(self.recommendation.get("value", np.nan))
        if chosen.empty or not np.isfinite(value):
            return None
        values = {axis: chosen[axis].iloc[0] for axis in self.axes}
        ranking, points = [Ranked(values, value, 1)], pd.DataFrame([values])
        return Headline("trials", self.metric, self.stage, ranking, 1, np.nan, points)


def sweeps(tables: Tables) -> list[Swept]:
    """Return the sweeps of a run, in the order of the table ``trials``."""
    trials, axes = rows(tables, "trials"), rows(tables, "sweep_points")
    if trials is None or axes is None:
        return []
    further = [name for name in axes if name not in trials.columns]
    swept = trials.merge(axes[["trial_id", *further]], on="trial_id")
    best, found = tables.get("recommendations", pd.DataFrame({"trained_stage": []})), []
    for stage, own in swept[swept["stage"] == SWEEP].groupby("trained_stage", sort=False):
        own = _medians(own)
        keys = [str(name) for name in axes if name not in _NOT_AXES]
        several = [key for key in keys if own[key].map(repr).nunique() > 1]
        rows_of = best[best["trained_stage"] == stage]
        row = {} if rows_of.empty else dict(rows_of.iloc[0].dropna())
        name = str(row.get("metric", _SPEED))
        better = _direction(str(row.get("mode", "max" if name == _SPEED else "min")))
        is_quality = bool(own["kind"].eq("quality").any())
        metric = Column(name, "real", "", better=better)
        found.append(Swept(str(stage), several, own, row, metric, is_quality))
    return found


def _medians(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials with numbers, without repeated measurements, with the medians over these.

    A trial that failed has no speed.
    """
    ended = trials["status"].isin(["succeeded", "interrupted"])
    numbers = trials[[name for name in REPEATED if name in trials]].apply(as_numbers)
    numbers[_SPEED] = numbers[_SPEED].where(ended)
    repeats = trials["repeats"].astype(object)  # a column of numbers if all are missing
    first = repeats.where(repeats.notna(), trials["trial_id"])
    memory = as_numbers(trials["gpu_peak_bytes"])
    if memory.isna().all():
        memory = as_numbers(trials["host_peak_bytes"])
    medians = numbers.groupby(first).transform("median").assign(**{_MEMORY: memory})
    return trials.assign(**medians)[repeats.isna()].reset_index(drop=True)


def sweep_asked(swept: Sequence[Swept]) -> Iterator[str]:
    """Yield which settings of which stage were tried."""
    for sweep in swept:
        counts = [f"{axis} ({len(sweep.trials[axis].map(repr).unique())} values)"
                  for axis in sweep.axes]  # fmt: skip
        trials = counted(len(sweep.trials), "trial")
        text = f"a sweep for the best {heading(sweep.metric.name)} of {sweep.stage} with {trials}"
        yield ": ".join(filter(None, [text, ", ".join(counts)]))


def sweep_section(tables: Tables, swept: Sequence[Swept]) -> Section:
    """Return recommendation, plots and trials of each swept stage."""
    parts: list[Part] = []
    for sweep in swept:
        if not sweep.chosen:
            parts.append(f"No trial of {sweep.stage} can be recommended.")
        if reason := sweep.recommendation.get("reason"):
            parts.append(f"{sweep.stage}: {reason}")
        if snippet := sweep.recommendation.get("snippet"):
            written = (line for line in snippet.strip().splitlines() if not line.startswith("#"))
            parts.append(Code("\n".join(written)))
        words = sweep.trials["status"].map(lambda status: _WORDS.get(status, status))
        column = sweep.metric if sweep.metric.name in sweep.trials else _FASTER
        table = Table(f"sweep-{sweep.stage}", "a trial", (column,), axes=tuple(sweep.axes))
        results = Results(table, plain(sweep.trials.assign(words=words)), list(sweep.axes))
        drawn = number_plots(results, column, "words")
        parts += [*drawn, *_sweep_front(sweep), *_sweep_curves(sweep, tables)]
        parts.append(_trials(sweep))
    return Section("Sweep", parts)


def _sweep_front(sweep: Swept) -> list[Plot]:
    """Draw the speed of every measured trial against its metric, or against its memory."""
    trials = sweep.trials[sweep.trials["status"] == "succeeded"]
    x = Column("peak memory, GiB", "real", "", better="lower")
    trials = trials.assign(**{x.name: trials[_MEMORY] / 2**30})
    if sweep.is_quality and sweep.metric.name in trials:
        x = sweep.metric
    return _front(f"sweep-{sweep.stage}-front", trials, sweep.axes, x, _FASTER, sweep.chosen)


def _sweep_curves(sweep: Swept, tables: Tables) -> Iterator[Plot]:
    """Draw the curve of each trial of a sweep that trains to the end."""
    steps = rows(tables, "steps")
    if steps is None or not sweep.is_quality:
        return
    column = sweep.metric.name if sweep.metric.name in steps.columns else "loss"
    trials = sweep.trials.set_index(sweep.trials["trial_id"].astype(str))
    labels = {str(trial): ", ".join(map(value_label, row)) or str(trial)
              for trial, row in trials[list(sweep.axes)].iterrows()}  # fmt: skip
    labels |= {sweep.chosen: "recommended"} if sweep.chosen else {}
    steps = steps[steps["trial_id"].isin(trials.index)].sort_values("step", kind="stable")
    drawn = step_lines(steps, column, labels)
    if len(drawn) > 1:
        chosen = next((line.name for line in drawn if line.name == "recommended"), "")
        better, title = sweep.metric.better, heading(column)
        figure = plots.lines(drawn, "optimizer step", title, better=better, chosen=chosen)
        caption = f"{len(drawn)} trials, named by {listed(sweep.axes)}; {better} is better."
        yield Plot(f"sweep-{sweep.stage}-curves", f"Curves of {title}", caption, figure)


def _trials(sweep: Swept) -> Fold:
    """Return all trials: the recommended first, then by speed."""
    trials = sweep.trials
    states = trials["status"].str.replace("_", " ").value_counts()
    trials = trials.assign(chosen=trials["trial_id"] == sweep.chosen).sort_values(
        ["chosen", _SPEED, "status"], ascending=[False, False, True], kind="stable"
    )
    trials = trials.assign(status=cells(map(Pill.of_status, trials["status"])))
    evaluated = [str(name) for name in trials if str(name).startswith(PREFIX)]
    columns = [*sweep.axes, "status", _SPEED, "step_time_s", "gpu_util_mean", _MEMORY,
               "energy_j_per_sample", "loss_final", "parity", *evaluated, "accumulation", "steps",
               "reason"]  # fmt: skip
    view = TableView(trials, list(dict.fromkeys(columns)), f"Trials of {sweep.stage}",
                     list(trials["chosen"]))  # fmt: skip
    counts = ", ".join(f"{count} {status}" for status, count in states.items())
    return Fold(f"All {len(trials)} trials of {sweep.stage}: {counts}", [view])
