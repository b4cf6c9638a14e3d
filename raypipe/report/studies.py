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
from raypipe.report import charts, plots
from raypipe.report.best import (
    Headline,
    Ranked,
    Results,
    as_numbers,
    headlines,
    plain,
    point_label,
    shape_of,
    value_label,
)
from raypipe.report.comparison import compared
from raypipe.report.formatting import counted, heading, listed, number, percent
from raypipe.report.measures import PREFIX, REPEATED
from raypipe.report.plots import Plot, rows
from raypipe.report.sections import (
    Code,
    Fold,
    Heading,
    Part,
    Pill,
    Section,
    TableView,
    cells,
)
from raypipe.report.tables import best_rows, number_plots
from raypipe.report.trainings import SWEEP, step_lines
from raypipe.report.variants import Tables, point_name, points, seeds_of, varied
from raypipe.stats import runs_needed
from raypipe.store.tables import Column, Table

_MOST_SNIPPETS = 5
_MOST_PLOTS = 4
_TONES = {"winner": "good", "dropped": "warn", "failed": "bad"}
_SPEED = "samples_per_s"
#: columns of ``sweep_points`` that are not axes
_NOT_AXES = ("trial_id", "run_id", "command_id", "variant", "trained_stage", "kind", "reference")
_NUMBERS = (_SPEED, "energy_j_per_sample", "gpu_peak_bytes", "host_peak_bytes", "parity",
            "accumulation")  # fmt: skip
_WORDS = {"out_of_memory": "OOM", "interrupted": "stopped", "succeeded": ""}
_ENDS = {"succeeded": "", "interrupted": "o"}


def _direction(mode: str) -> Any:
    return "higher" if mode == "max" else "lower"


def _yaml(point: Mapping[str, Any]) -> str:
    """Return the values of a point by dotted key as a part of a configuration."""
    return dump_yaml(nested(point))


def best_yaml(point: str) -> str:
    """Return the values of a point of a matrix, given as JSON with texts, as YAML."""
    return _yaml({key: text_value(text) for key, text in json.loads(point).items()})


@dataclass(frozen=True)
class Searched:
    """A search: its points with a column per searched key, and the mode of each metric."""

    points: pd.DataFrame
    keys: Sequence[str]
    modes: Mapping[str, str]

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
        columns |= {name: np.nan for name in modes if name not in found}  # nothing was measured
        return cls(plain(found.assign(**columns)), keys, modes)

    @property
    def measured(self) -> pd.DataFrame:
        """The points with metrics."""
        return self.points[self.points["status"] == "succeeded"]

    @property
    def front(self) -> pd.DataFrame:
        """The points that meet all conditions and that no other one is better than."""
        first = next(iter(self.modes))
        on_front = self.points[self.points["on_front"].astype(bool)]
        return on_front.sort_values(first, kind="stable")

    @property
    def best(self) -> dict[str, Any]:
        """The values of a best point; empty without one."""
        best = self.points[self.points["on_front"].astype(bool)]
        return {} if best.empty else json.loads(best["point"].iloc[0])

    def results(self, metric: str) -> Results:
        """Return the points that meet all conditions as rows of a table with a metric."""
        column = Column(metric, "real", "", better=_direction(self.modes[metric]))
        table = Table("search", "a point", (column,), axes=tuple(self.keys))
        feasible = self.measured[self.measured["feasible"].astype(bool)]
        return Results(table, plain(feasible.drop(columns=["number"])))


def search_headlines(tables: Tables) -> list[Headline]:
    """Return the best point of a search by each of its metrics; it meets all conditions."""
    search = Searched.of(tables)
    found = []
    for name in search.modes if search is not None else ():
        assert search is not None
        results = search.results(name)
        varied = [key for key in search.keys if search.points[key].map(repr).nunique() > 1]
        # also where all points with a number are equal: a point is named, and counts once
        shape = replace(shape_of(results.table, results.rows), axes=tuple(varied or search.keys))
        for best in headlines(results.table, results.rows, shape):
            owner, _, rest = name.partition(".")
            shown, _, group = rest.removesuffix(")").partition(" (")
            column = replace(best.column, name=shown)
            found.append(replace(best, table=owner, column=column, group=group))
    return found


def search_section(tables: Tables) -> Section:
    """Return the way to the best points of a search, the best points, and their YAML."""
    search = Searched.of(tables)
    if search is None:
        return Section("Search", [])
    counts = search.points["status"].value_counts()
    unmeasured = [f"{counts[n]} {n}" for n in ("running", "failed", "excluded") if n in counts]
    broken = int((~search.measured["feasible"].astype(bool)).sum())
    unmeasured += [f"{broken} break a condition"] * (broken > 0)
    text = f"{counted(len(search.points), 'point')} proposed"
    parts: list[Part] = [f"{text} ({', '.join(unmeasured)})." if unmeasured else f"{text}."]
    if len(search.measured) > 1:
        with plots.style():
            parts.append(_scatter(search))
        first = search.results(next(iter(search.modes)))
        if first.shape.axes:
            parts.append(best_rows(first, first.table.columns[0]))
    for _, row in search.front.head(_MOST_SNIPPETS).iterrows():
        metrics = ", ".join(f"{name} {number(float(row[name]))}" for name in search.modes)
        title = f"Configuration of point {row['number'] + 1}: {metrics}"
        parts.append(Fold(title, [Code(_yaml(json.loads(row["point"])))]))
    return Section("Search", parts)


def _scatter(search: Searched) -> Plot:
    """Draw the points as they ended with the best so far, or two metrics with their front.

    A point that breaks a condition is a cross.
    """
    metrics = list(search.modes)[:2]
    points = search.measured.sort_values("ended", kind="stable")
    feasible, on_front = (points[name].astype(bool) for name in ("feasible", "on_front"))
    titles = [f"{name}, {_direction(search.modes[name])} is better" for name in metrics]
    signs = [1 if search.modes[name] == "min" else -1 for name in metrics]
    tips = [
        f"{_name(row['point'])}: {', '.join(number(float(row[name])) for name in metrics)}"
        for _, row in points.iterrows()
    ]
    front, crosses = search.front, ""
    if not feasible.all():
        crosses = f" Crosses: {int((~feasible).sum())} that break a condition."
    if len(metrics) == 1:
        x, y = points["ended"] + 1, points[metrics[0]]
        top = signs[0] * y.where(feasible)
        best = signs[0] * top.cummin().ffill()
        line = (x.to_numpy(float), best.to_numpy(float), "steps-post")
        titles.insert(0, "points that ended")
        title = "No point meets the conditions"
        if len(front):
            value = number(float(front[metrics[0]].iloc[0]))
            title = f"Point {front['number'].iloc[0] + 1} is the best: {value}"
            if (ties := front["point"].nunique()) > 1:
                title = f"{ties} points are equally good: {value}"
        caption = f"{len(points)} measurements of {counted(len(search.points), 'point')}. "
        caption += "The line is the best so far."
    else:
        x, y = points[metrics[0]], points[metrics[1]]
        line = charts.front(x[feasible], y[feasible], (signs[0], signs[1]))
        title = f"The Pareto front has {counted(len(front), 'point')}"
        caption = f"{len(points)} points; large: the {len(front)} that no other one dominates."
    figure = charts.scatter(
        x, y, *titles, line=line, tips=tips, crosses=list(~feasible), large=list(on_front)
    )
    return Plot("search-progress", title, caption + crosses, figure)


def race_section(tables: Tables) -> Section:
    """Return the verdict, the means of all points by seeds, and the last state of each point."""
    race = rows(tables, "race")
    if race is None:
        return Section("Race", [])
    last = race.sort_values("round", kind="stable").groupby("point", sort=False).tail(1)
    last = last.sort_values("round", ascending=False, kind="stable")
    parts: list[Part] = [_verdict(race, last)]
    if race["round"].nunique() > 1:
        with plots.style():
            parts.append(_means(race))
    shown = last.assign(
        point=cells(Code(_name(point)) for point in last["point"]),
        status=cells(Pill(status, _TONES.get(status, "")) for status in last["status"]),
        last_round=last["round"],
    )
    columns = ["point", "status", "mean", "runs", "last_round", "p_holm"]
    winners = list(last["status"] == "winner")
    parts.append(TableView(shown, columns, "Points of the race", winners))
    parts += [
        Fold("Configuration of the winner", [Code(_yaml(json.loads(point)))])
        for point in last[winners]["point"]
    ]
    return Section("Race", parts)


def _name(point: str) -> str:
    return point_text(json.loads(point))


def _means(race: pd.DataFrame) -> Plot:
    """Draw the mean of each point over the seeds so far, up to the round that dropped it."""
    drawn = []
    for point, own in race[race["mean"].notna()].groupby("point", sort=False):
        own = own.sort_values("round")
        end = {"winner": "o", "contender": ""}.get(own["status"].iloc[-1], "X")
        x, y = (own[name].to_numpy(float) for name in ("runs", "mean"))
        drawn.append(charts.Line(point_label(json.loads(str(point))), x, y, end=end))
    figure = charts.lines(drawn, "seeds of each point", "mean over seeds", steps=False)
    caption = "A cross is where a point was dropped, a dot the winner."
    return Plot("race-means", "Means of the points in the race", caption, figure)


def _verdict(race: pd.DataFrame, last: pd.DataFrame) -> str:
    final = race[race["round"] == race["round"].max()]
    runs, rounds = int(final["runs"].iloc[0]), int(race["round"].max())
    text = f"{len(last)} points, {counted(rounds, 'round')}, up to {counted(runs, 'seed')}."
    winners = last[last["status"] == "winner"]
    if len(winners):
        row = winners.iloc[0]
        return f"{text} {_name(row['point'])} wins with a mean of {number(float(row['mean']))}."
    left = int((final["status"] == "contender").sum())
    return f"{text} Undecided between {left} points."


def variants_section(
    tables: Tables, shown: Mapping[str, str] | None, trained: Sequence[Results] = ()
) -> Section:
    """Return the comparison of the variants of a matrix: best points, means and paired tests.

    Args:
        tables: those that the stage ``compare_variants`` derived among them.
        shown: the point of the experiment's own sections.
        trained: the trainings of each stage with a number to compare; other tables have sections.

    """
    if rows(tables, "variants") is None:
        return Section("Variants", [])
    if rows(tables, "variant_metrics") is None:  # the stage that compares them was not asked for
        tables = {**tables, **compared(tables, {})}
    found, tests = rows(tables, "variant_metrics"), rows(tables, "variant_tests")
    if found is None:
        return Section("Variants", [])
    parts: list[Part] = [_introduction(tables, shown), *_best_points(tables)]
    drawn = [p for each in trained for c in each.table.columns for p in number_plots(each, c)]
    parts += drawn[:_MOST_PLOTS]
    search = Searched.of(tables)
    searched = search.keys if search is not None else ()  # compared in the section of the search
    found = found[~found["axis"].isin(searched)]
    columns = ["metric", "axis", "value", "seeds", "mean", "std", "low", "high"]
    if found["unmatched"].fillna(0).any():
        columns.insert(4, "unmatched")
        parts.append(
            "Some points are missing, so the means of two values are not over the same points. "
            "The tests compare two values at the points that both have."
        )
    parts.append(TableView(found, columns, "Means over seeds"))
    if tests is not None:
        columns = ["metric", "axis", "first", "second", "n", "p_holm", "effect", "conclusion"]
        tests = tests[~tests["axis"].isin(searched)]
        parts.append(TableView(tests, columns, "Paired tests"))
    return Section("Variants", parts)


def _introduction(tables: Tables, shown: Mapping[str, str] | None) -> str:
    axes = varied(tables)
    compared = {point_name({k: v for k, v in p.items() if not is_seed(k)}) for p in points(tables)}
    seeds = seeds_of(tables)
    text = counted(len(compared), "point")
    if keys := [f"{k} ({len(v)} values)" for k, v in sorted(axes.items()) if not is_seed(k)]:
        text += f" over {', '.join(keys)}"
    text += f", with {seeds} seeds." if seeds > 1 else "."
    if shown:
        text += f" The experiment's own sections show the point {point_name(shown)}; "
        text += "raypipe report RUN_DIR --variant POINT shows another one."
    return text


def _best_points(tables: Tables) -> list[Part]:
    """Return the best point for each metric with its YAML."""
    found = rows(tables, "best_variants")
    if found is None:
        return []
    names = [Code(point_name(json.loads(point))) for point in found["point"]]
    columns = ["metric", "better", "mean", "seeds", "points", "point"]
    folds = [
        Fold(f"Configuration of the best {metric}", [Code(best_yaml(point))])
        for metric, point in zip(found["metric"], found["point"], strict=True)
    ]
    return [
        Heading("Best points"),
        "The mean over seeds decides; the tests below tell whether it is more than chance.",
        TableView(found.assign(point=cells(names)), columns, "Best points"),
        *folds,
    ]


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

    ``trials`` are the points of the sweep, ``all_trials`` also the fp32 trials that are only
    references of the loss; both have a column per axis, named as a reader knows it, and a speed
    unless the trial failed. Trials that were measured again occur once, with the medians.
    ``recommendation`` is the row of the table, empty without one; ``chosen`` the id of its trial.
    """

    stage: str
    axes: Sequence[str]
    trials: pd.DataFrame
    all_trials: pd.DataFrame
    recommendation: Mapping[str, Any]
    chosen: str
    metric: str
    better: Any
    is_quality: bool

    @property
    def headline(self) -> Headline | None:
        """The recommended point, which need not be the one with the best number."""
        chosen = self.trials[self.trials["trial_id"] == self.chosen]
        value = self.recommendation.get("value")
        if value is None and len(chosen) and self.metric in chosen:
            value = chosen[self.metric].iloc[0]
        if chosen.empty or value is None or not np.isfinite(float(value)):
            return None
        column = Column(self.metric, "real", "", better=self.better)
        values = {axis: chosen[axis].iloc[0] for axis in self.axes}
        ranking = [Ranked(values, float(value), 1)]
        return Headline("trials", column, self.stage, ranking, 1, np.nan, pd.DataFrame([values]))


def sweeps(tables: Tables) -> list[Swept]:
    """Return the sweeps of a run, in the order of the table ``trials``."""
    trials = rows(tables, "trials")
    if trials is None or (swept := trials[trials["stage"] == SWEEP]).empty:
        return []
    keys: list[str] = []
    if (points := rows(tables, "sweep_points")) is not None:
        keys = [str(name) for name in points if name not in _NOT_AXES]
        further = [name for name in points if name not in swept.columns]
        swept = swept.merge(points[["trial_id", *further]], on="trial_id", how="left")
    best = tables.get("recommendations", pd.DataFrame({"trained_stage": []}))
    found = []
    for stage, group in swept.groupby("trained_stage", sort=False):
        own = _medians(_clean(group))
        shown = {key: key.removeprefix(f"{stage}.").removeprefix("training.") for key in keys}
        own = own.rename(columns={k: v for k, v in shown.items() if v not in own.columns})
        axes = [name for name in shown.values() if own[name].map(repr).nunique() > 1]
        of_stage = best[best["trained_stage"] == stage].iloc[:1]
        row = {str(n): of_stage[n].iloc[0] for n in of_stage if of_stage[n].notna().any()}
        metric = str(row.get("metric", _SPEED))
        better = _direction(str(row.get("mode", "max" if metric == _SPEED else "min")))
        of_sweep = own[~own["reference"]].reset_index(drop=True)
        chosen, is_quality = str(row.get("trial_id", "")), bool((own["kind"] == "quality").any())
        found.append(
            Swept(str(stage), axes, of_sweep, own, row, chosen, metric, better, is_quality)
        )
    return found


def _clean(table: pd.DataFrame) -> pd.DataFrame:
    """Return a copy with every column that is read: NaN, false or empty where unknown."""
    unknown = pd.Series(None, table.index, dtype=object)
    columns: dict[str, Any] = {}
    for name in _NUMBERS:
        values = as_numbers(table.get(name, unknown))
        columns[name] = values.where(np.isfinite(values))
    for name in ("trial_id", "status", "kind", "precision"):
        columns[name] = table.get(name, unknown).fillna("").astype(str)
    columns["reference"] = table.get("reference", unknown).eq(True).astype(bool)
    measured = columns["status"].isin(["succeeded", "interrupted"])
    columns[_SPEED] = columns[_SPEED].where(measured)
    on_gpu = columns["gpu_peak_bytes"].notna().any()
    columns["peak_memory_bytes"] = columns["gpu_peak_bytes" if on_gpu else "host_peak_bytes"]
    columns["energy_per_sample_j"] = columns["energy_j_per_sample"]
    columns["repeats"] = table.get("repeats", unknown)
    columns["reason"] = table.get("reason", unknown)
    return table.assign(**columns)


def _medians(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials without repeated measurements, with the medians over these."""
    names = [name for name in REPEATED if name in trials.columns]
    numbers = trials[names].apply(pd.to_numeric, errors="coerce")
    first = trials["repeats"].astype("string").fillna(trials["trial_id"])
    medians = numbers.groupby(first).transform("median")
    trials = trials.assign(**{name: medians[name] for name in names})
    return trials[trials["repeats"].isna()].reset_index(drop=True)


def sweep_asked(swept: Sequence[Swept]) -> Iterator[str]:
    """Yield which settings of which stage were tried."""
    for sweep in swept:
        counts = [
            f"{axis} ({sweep.trials[axis].map(repr).nunique()} values)" for axis in sweep.axes
        ]
        what = "the best settings"
        if sweep.metric == _SPEED and not sweep.is_quality:
            what = "the fastest settings"
        text = f"a sweep for {what} of {sweep.stage} with {counted(len(sweep.trials), 'trial')}"
        yield f"{text}: {', '.join(counts)}" if counts else text


def sweep_certainty(swept: Sequence[Swept]) -> Iterator[str]:
    """Yield how far the recommended point of each sweep varied; its section has the reason."""
    for sweep in swept:
        if not sweep.chosen:
            continue
        ends = [sweep.recommendation.get(name, np.nan) for name in ("value_low", "value_high")]
        text = "each point was measured once, so there is no range"
        if ends[0] < ends[1]:
            low, high = (number(float(end)) for end in ends)
            text = f"the recommended point was measured at {low} to {high}"
        yield f"{sweep.stage}: {text}."


def sweep_section(tables: Tables, swept: Sequence[Swept]) -> Section:
    """Return recommendation, plots and tables of each swept stage."""
    parts: list[Part] = []
    for sweep in swept:
        parts.append(Heading(sweep.stage))
        if not sweep.chosen:
            parts.append(f"No trial of {sweep.stage} can be recommended.")
        if reason := sweep.recommendation.get("reason"):
            parts.append(reason)
        if snippet := sweep.recommendation.get("snippet"):
            written = (line for line in snippet.strip().splitlines() if not line.startswith("#"))
            parts.append(Code("\n".join(written)))
        parts += [*_sweep_plots(sweep, tables), _trials(sweep, tables)]
    return Section("Sweep", parts)


def _sweep_plots(sweep: Swept, tables: Tables) -> list[Plot]:
    """Draw the metric, the speed and the parity by axis, the front, and the curves of quality."""
    words = sweep.trials["status"].map(lambda status: _WORDS.get(status, status))
    trials = sweep.trials.assign(
        words=words, **{"difference from fp32 in percent": 100 * sweep.trials["parity"]}
    )
    metrics = {sweep.metric: sweep.better} if sweep.is_quality else {_SPEED: _direction("max")}
    metrics["difference from fp32 in percent"] = _direction("min")
    columns = tuple(Column(n, "real", "", better=b) for n, b in metrics.items() if n in trials)
    table = Table(f"sweep-{sweep.stage}", "a trial", columns, axes=tuple(sweep.axes))
    results = Results(table, plain(trials), list(sweep.axes))
    drawn = [plot for column in columns for plot in number_plots(results, column, "words")]
    with plots.style():
        return [*drawn[:_MOST_PLOTS], *_sweep_fronts(sweep), *_sweep_curves(sweep, tables)]


def _sweep_fronts(sweep: Swept) -> Iterator[Plot]:
    """Draw the speed of every measured trial against its quality, memory and energy."""
    trials = sweep.trials[sweep.trials["status"] == "succeeded"].dropna(subset=[_SPEED])
    size, unit = (2**30, "GiB") if trials["peak_memory_bytes"].max() >= 2**31 else (2**20, "MiB")
    trials = trials.assign(memory=trials["peak_memory_bytes"] / size)
    panels = {"memory": (f"peak memory, {unit}", 1), "energy_per_sample_j": ("J per sample", 1)}
    if sweep.is_quality and sweep.metric in trials:
        sign = -1 if sweep.better == "higher" else 1
        panels = {sweep.metric: (heading(sweep.metric), sign), **panels}
    for column, (name, sign) in panels.items():
        known = trials[np.isfinite(as_numbers(trials[column]))]
        if known[[column, _SPEED]].drop_duplicates().shape[0] < 2:
            continue
        x, y = as_numbers(known[column]), known[_SPEED]
        ring = np.flatnonzero(known["trial_id"] == sweep.chosen)
        tips = [f"{point_label(dict(row[list(sweep.axes)]))}: {number(float(row[_SPEED]))}/s"
                for _, row in known.iterrows()]  # fmt: skip
        figure = charts.scatter(
            x, y, f"{name}, {'lower' if sign > 0 else 'higher'} is better",
            "samples per second, higher is better", line=charts.front(x, y, (sign, -1)), tips=tips,
            kinds=list(known["precision"]), ring=int(ring[0]) if len(ring) else None,
        )  # fmt: skip
        caption = (
            f"{counted(len(known), 'trial')}. The line joins those that no other beats in both."
        )
        yield Plot(f"sweep-{sweep.stage}-{column}-front", f"Speed and {name}", caption, figure)


def _sweep_curves(sweep: Swept, tables: Tables) -> Iterator[Plot]:
    """Draw the curve of each trial of a sweep that trains to the end; marks are early ends."""
    steps = rows(tables, "steps")
    if steps is None or not sweep.is_quality:
        return
    column = sweep.metric if sweep.metric in steps.columns else "loss"
    status = sweep.trials.set_index("trial_id")["status"]
    axes = sweep.trials.set_index("trial_id")[list(sweep.axes)].to_dict("index")
    labels = {str(t): ", ".join(map(value_label, p.values())) or str(t) for t, p in axes.items()}
    labels[sweep.chosen] = "recommended"
    ends = {str(trial): _ENDS.get(each, "X") for trial, each in status.items()}
    drawn = step_lines(steps[steps["trial_id"].isin(status.index)], column, labels, ends)
    if len(drawn) < 2:
        return
    chosen = "recommended" if any(line.name == "recommended" for line in drawn) else ""
    title = "training loss" if column == "loss" else heading(column)
    figure = charts.lines(drawn, "optimizer step", title, better=sweep.better, chosen=chosen)
    caption = f"{len(drawn)} trials, named by {listed(sweep.axes)}; {sweep.better} is better."
    if early := sum(bool(line.end) for line in drawn):
        caption += f" {early} ended early, where their marks are."
    name = f"sweep-{sweep.stage}-curves"
    yield Plot(name, f"{title[:1].upper()}{title[1:]} of all trials", caption, figure)


def _trials(sweep: Swept, tables: Tables) -> Fold:
    """Return all trials: the recommended first, then by speed; ``front`` marks the Pareto front."""
    trials, pareto = sweep.all_trials, rows(tables, "pareto")
    chosen = trials["trial_id"] == sweep.chosen
    unexplained = trials["reference"] & trials["reason"].isna()
    on_front = trials["trial_id"].isin([] if pareto is None else pareto["trial_id"])
    counts = trials["status"].str.replace("_", " ").value_counts()
    trials = trials.assign(
        reason=trials["reason"].mask(unexplained, "reference of the loss"),
        parity=cells(percent(v) if pd.notna(v) else None for v in trials["parity"]),
        front=cells("front" if each else None for each in on_front),
        chosen=chosen,
    ).sort_values(["chosen", _SPEED, "status"], ascending=[False, False, True], kind="stable")
    trials = trials.assign(status=cells(map(Pill.of_status, trials["status"])))
    evaluated = [str(name) for name in trials if str(name).startswith(PREFIX)]
    columns = [*sweep.axes, "front", "status", _SPEED, "step_time_s", "gpu_util_mean",
               "peak_memory_bytes", "energy_per_sample_j", "loss_final", "parity", *evaluated,
               "accumulation", "steps", "reason"]  # fmt: skip
    view = TableView(trials, list(dict.fromkeys(columns)), f"Trials of {sweep.stage}",
                     list(trials["chosen"]))  # fmt: skip
    states = ", ".join(f"{n} {status}" for status, n in counts.items())
    text = f"All {len(trials)} trials: {states}; {int(on_front.sum())} on the Pareto front"
    return Fold(text, [view])
