"""Results of a run, which every view of it asks: report, ``show``, ``ls``, ``compare``, Python.

They are those of its tables, of the variants of a matrix, of a search, and of sweeps. Nothing here
draws.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from raypipe.config.matrix import SEED, is_seed, text_value
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.report.formatting import counted, listed
from raypipe.report.tables import (
    MATRIX_SEED,
    Headline,
    Ranked,
    Results,
    as_numbers,
    headlines,
    plain,
)
from raypipe.stats import finite_or_none, runs_needed
from raypipe.store.ledger import Row
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import VARIANT, Column, Table, read_arrow

if TYPE_CHECKING:
    from raypipe.report.parts import Section

Tables = Mapping[str, pd.DataFrame]

#: the stage of a trial of a sweep; ``trained_stage`` is the stage that it trained
SWEEP = "sweep"
#: names of metrics of which lower or higher is better, unless the experiment says otherwise
_LOWER = re.compile(
    r"loss|perplexity|entropy|error|regret|nll|(^|_)(mae|mse|rmse|ppl|wer|time|bytes|energy)(_|$)"
)
_HIGHER = re.compile(
    r"accuracy|(^|_)(acc|auc|auroc|bleu|f1|mfu|mrr|precision|r2|recall|rouge)(_|$)"
)
_RATE = re.compile(r"_per_s$")
#: begins the names of columns with held-out metrics
PREFIX = "eval_"
#: stands for a training without evaluations
LOSS = Column("loss_final", "real", "Training loss of the last logged step.", better="lower")
#: columns of ``trials`` that another measurement of the same trial changes; all are above 0
REPEATED = ("samples_per_s", "tokens_per_s", "step_time_s", "flops_per_s", "mfu", "energy_j")
_DIRECTIONS: Mapping[str, Any] = {"min": "lower", "max": "higher"}
SPEED = Column("samples_per_s", "real", "", better="higher")


def variants_of(tables: Tables) -> dict[str, dict[str, str]]:
    """Return the values of each variant of a matrix by key, as text."""
    table = tables.get("variants", pd.DataFrame(columns=["variant", "key", "value"]))
    return {str(name): dict(zip(own["key"], own["value"], strict=True))
            for name, own in table.groupby("variant", sort=False)}  # fmt: skip


def joined(table: Table, rows: pd.DataFrame, tables: Tables) -> Results:
    """Return rows with a column for each key of the matrix that they depend on; keys are axes.

    In a table of calls null may be an argument, and is a value of an axis like others. In other
    tables a missing value says that the axis does not apply. A key has numbers if all of its values
    are.
    """
    variants = variants_of(tables)
    for name in table.axes if table.open else ():
        if name in rows.columns and rows[name].isna().any() and rows[name].notna().any():
            values = rows[name].astype(object)
            rows = rows.assign(**{name: values.where(values.notna(), "null")})
    if VARIANT.name not in rows.columns or not variants:
        return Results(table, plain(rows))
    names = rows[VARIANT.name].astype(str)
    columns: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for name in names.unique() for key in variants.get(name, {})):
        is_argument = table.open and key.removeprefix("arguments.") in table.axes
        if not is_argument and (key == SEED or key not in rows.columns):
            texts = [variants.get(name, {}).get(key) for name in names]
            parsed = [None if text is None else text_value(text) for text in texts]
            is_numeric = all(type(value) in (int, float, type(None)) for value in parsed)
            columns[MATRIX_SEED if key == SEED else key] = parsed if is_numeric else texts
    compared = [key for key in columns if key != MATRIX_SEED and not is_seed(key)]
    table = replace(table, axes=(*table.axes, *compared))
    return Results(table, plain(rows.assign(**columns)))


def varied(tables: Tables) -> dict[str, list[str]]:
    """Return the values of each varied key of a matrix, as text; seeds are among them."""
    variants = pd.DataFrame.from_dict(variants_of(tables), orient="index")
    return {str(key): list(values.dropna().unique()) for key, values in variants.items()}


def points(tables: Tables) -> list[dict[str, str]]:
    """Return the values of every point by key; a variant within another one is not a point."""
    values = list(variants_of(tables).values())
    several = {frozenset(one) for one in values}
    parts = {frozenset((key, one[key]) for key in keys)
             for one in values for keys in several if keys < one.keys()}  # fmt: skip
    return [one for one in values if frozenset(one.items()) not in parts]


@dataclass(frozen=True)
class Searched:
    """A search: its points with a column per searched key, and its metrics."""

    points: pd.DataFrame
    keys: Sequence[str]
    metrics: Sequence[Column]

    @classmethod
    def of(cls, tables: Tables) -> Searched | None:
        """Return the search of a run; None if it has none."""
        table = tables.get("search", pd.DataFrame())
        if table.empty:
            return None
        values = [json.loads(text) for text in table["point"]]
        keys = list(dict.fromkeys(key for point in values for key in point))
        columns: dict[str, Any] = {key: [point.get(key) for point in values] for key in keys}
        modes = json.loads(table["objectives"].iloc[0])
        metrics = [Column(n, "real", "", better=_DIRECTIONS[mode]) for n, mode in modes.items()]
        columns |= {name: np.nan for name in modes if name not in table}  # nothing was measured
        return cls(plain(table.assign(**columns)), keys, metrics)

    def has(self, table: str, column: str) -> bool:
        """Whether a number of a table is one of the metrics."""
        return any(each.name.partition(" (")[0] == f"{table}.{column}" for each in self.metrics)

    @property
    def measured(self) -> pd.DataFrame:
        """The points with metrics."""
        return self.points[self.points["status"] == "succeeded"]

    @property
    def front(self) -> pd.DataFrame:
        """The points that no other one is better than."""
        on_front = self.points[self.points["on_front"].astype(bool)]
        return on_front.sort_values(self.metrics[0].name, kind="stable")

    @property
    def results(self) -> Results:
        """The points as rows of a table with the metrics."""
        table = Table("search", "a point", tuple(self.metrics), axes=tuple(self.keys))
        order = ["number", "ended"]  # numbers about the proposals
        return Results(table, plain(self.measured.drop(columns=order, errors="ignore")))

    @property
    def headlines(self) -> list[Headline]:
        """The best point by each metric."""
        results, found = self.results, []
        several = [key for key in self.keys if self.points[key].map(repr).nunique() > 1]
        # also where all points with a number are equal: a point is named, and counts once
        shape = replace(results.shape, axes=tuple(several or self.keys))
        for best in headlines(results, shape):
            owner, _, rest = best.column.name.partition(".")
            shown, _, group = rest.removesuffix(")").partition(" (")
            column = replace(best.column, name=shown)
            found.append(replace(best, table=owner, column=column, group=group))
        return found


@dataclass(frozen=True)
class Swept:
    """The trials of one swept stage, and the recommended one.

    ``trials`` have a column per axis, its dotted key, and a speed unless the trial failed. Trials
    that were measured again occur once, with the medians. ``recommendation`` is the row of the
    table, empty without one.
    """

    stage: str
    axes: Sequence[str]
    trials: pd.DataFrame
    recommendation: Mapping[str, Any]
    metric: Column

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
        return Headline("trials", self.metric, self.stage, [Ranked(values, value, 1)], 1, np.nan, 1)


def medians(rows: Iterable[Mapping[Any, Any]]) -> list[Row]:
    """Return one row per trial that was measured again, with the medians of its measurements.

    Its status is that of a measurement that did not succeed, if there is one. A measurement that
    failed has no number.
    """
    groups: dict[str, list[Mapping[Any, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("repeats") or row["trial_id"], []).append(row)
    found = []
    for group in groups.values():
        first = next((row for row in group if not row.get("repeats")), group[0])
        status = next((row["status"] for row in group if row["status"] != "succeeded"), "succeeded")
        ended = [row for row in group if row["status"] in ("succeeded", "interrupted")]
        middle: Row = {}
        for name in REPEATED:
            values = [finite_or_none(row.get(name)) for row in ended]
            numbers = [value for value in values if value is not None]
            middle[name] = median(numbers) if numbers else None
        found.append({**first, **middle, "status": status})
    return found


@dataclass(frozen=True)
class Declarations:
    """An experiment's own description of itself.

    Args:
        sentence: what it does, or empty.
        tables: its tables.
        core: the tables that every run has by name, with the columns that its trainings add. None
            if they are not known.
        asked: returns the units that the newest command asked for, if that differs by command.

    """

    sentence: str = ""
    tables: Sequence[Table] = ()
    core: Mapping[str, Table] | None = None
    asked: Callable[[], Collection[str]] | None = None


@dataclass(frozen=True)
class RunResults:
    """A run: its tables, its experiment, the command that continues it, and its configuration.

    ``sections`` are the experiment's own. ``directory`` tells missing numbers from NaN, which are
    the same in the tables.
    """

    tables: Tables
    title: str = ""
    command: str = ""
    configuration: str = ""
    declared: Declarations = field(default_factory=Declarations)
    sections: Sequence[Section] = ()
    directory: RunDirectory | None = None

    def core(self, name: str) -> Table:
        """Return the declaration of a table that every run has; empty if it is not known."""
        return (self.declared.core or {}).get(name, Table(name, ""))

    @cached_property
    def bests(self) -> list[Headline]:
        """The best results, the most important first: all views of a run name these.

        They are those of :attr:`headlines`; without any, those that its sweeps recommend.
        """
        return self.headlines or self.recommended

    @property
    def result(self) -> str:
        """The first of the best results, which stands for the run; empty without any."""
        return self.bests[0].result if self.bests else ""

    @cached_property
    def headlines(self) -> list[Headline]:
        """The best results of its search and of its tables; without any, of its trainings."""
        return self.measured or self.training_headlines

    @cached_property
    def measured(self) -> list[Headline]:
        """The best points of a search and of all tables of the experiment."""
        sought = self.search.headlines if self.search is not None else []
        named = {best.metric for best in sought}
        own = [best for results in self.results for best in results.headlines]
        return [*sought, *(best for best in own if best.metric not in named)]

    @cached_property
    def search(self) -> Searched | None:
        """Its search; None if it has none."""
        return Searched.of(self.tables)

    @cached_property
    def results(self) -> list[Results]:
        """The tables of the experiment that have rows."""
        written = [t for t in self.declared.tables if len(self.tables.get(t.name, ()))]
        return [joined(table, self.tables[table.name], self.tables) for table in written]

    @cached_property
    def trained(self) -> list[Results]:
        """The trainings of each stage, with the number that stands for them."""
        trials = self.tables.get("trials", pd.DataFrame(columns=["stage", "status", "variant"]))
        done = trials[(trials["status"] == "succeeded") & (trials["stage"] != SWEEP)]
        key = "variant" if self.varied else "trial_id"
        if self.varied:
            done = done[done["variant"].isin(list(variants_of(self.tables)))]
        found = []
        for stage, own in done.groupby("stage", sort=False):
            known = [str(column) for column in own if own[column].notna().any()]
            metrics = self.core("trials").columns
            for measure in training_measures(known, metrics, self.monitors)[:1]:
                table = Table(f"trials-{stage}", "a training", (measure,), axes=("trial_id",))
                found.append(joined(table, own[[key, measure.name]], self.tables))
        return found

    @property
    def training_headlines(self) -> list[Headline]:
        """The best training of each stage; of a matrix the best point."""
        found = []
        for results in self.trained:
            group = results.table.name.removeprefix("trials-") if len(self.trained) > 1 else ""
            found += [replace(best, table="trials", group=group) for best in results.headlines]
        return found

    @cached_property
    def sweeps(self) -> list[Swept]:
        """The swept stages with their trials, in the order of the table ``trials``."""
        trials, axes = (self.tables.get(n, pd.DataFrame()) for n in ("trials", "sweep_points"))
        if trials.empty or axes.empty:
            return []
        keys = [str(name) for name in axes if "." in str(name)]
        swept = trials.merge(axes[["trial_id", *(axes.columns.difference(trials.columns))]])
        best = self.tables.get("recommendations", pd.DataFrame({"trained_stage": []}))
        found = []
        for stage, own in swept[swept["stage"] == SWEEP].groupby("trained_stage", sort=False):
            several = [key for key in keys if own[key].map(repr).nunique() > 1]
            rows = best[best["trained_stage"] == stage]
            row = {} if rows.empty else dict(rows.iloc[0].dropna())
            name = str(row.get("metric", SPEED.name))
            better = _DIRECTIONS[row.get("mode", "max" if name == SPEED.name else "min")]
            metric = Column(name, "real", "", better=better)
            plain_rows = own.astype(object).where(own.notna(), None).to_dict("records")
            found.append(Swept(str(stage), several, pd.DataFrame(medians(plain_rows)), row, metric))
        return found

    @property
    def recommended(self) -> list[Headline]:
        """The recommended point of each swept stage."""
        return [best for sweep in self.sweeps if (best := sweep.headline) is not None]

    @cached_property
    def failures(self) -> pd.DataFrame:
        """The failed attempts of units that the newest command asked for, as far as it is known.

        A matrix asks for all of its units.
        """
        found = self.tables.get("failures", pd.DataFrame(columns=["stage", "unit", "kind"]))
        if self.declared.asked is None or self.varied:
            return found
        return found[found["unit"].isin(self.declared.asked())] if len(found) else found

    @cached_property
    def not_finite(self) -> list[str]:
        """How many results are NaN or infinite; they are in no mean and never best."""
        found = []
        for table, rows, shape in ((each.table, each.rows, each.shape) for each in self.results):
            named = [column.name for column in table.columns if column.better]
            if table.open and not named:
                named = [column.name for column in shape.numbers]
            for name in (name for name in named if name in rows):
                is_bad = ~np.isfinite(as_numbers(rows[name]))
                if is_bad.any() and self.directory is not None:
                    cells = read_arrow(self.directory, table.name).column(name)
                    is_bad &= cells.is_valid().to_numpy()  # NaN is a value
                if is_bad.any():
                    bad = "any" if is_bad.all() else is_bad.sum()
                    count = f"{bad} of {counted(len(rows), 'row')}"
                    found.append(f"{table.name}.{name} is not finite in {count}.")
        return found

    @property
    def beaten(self) -> list[str]:
        """A sentence for each result that is not better than a baseline of the same run.

        The end of a command warns of them; in the report the headline numbers have the distance.
        """
        lost: dict[str, list[str]] = {}
        for best in self.measured:
            if best.baseline is not None and best.baseline.gain <= 0:
                subject = f"{best.leaders or 'The best row'} {'are' if best.ties > 1 else 'is'}"
                text = f"{subject} not better than the baseline {best.baseline.label} in"
                lost.setdefault(text, []).append(best.name)
        return [f"{text} {listed(names)}." for text, names in lost.items()]

    @cached_property
    def nodes(self) -> pd.DataFrame:
        """The rows of the newest command in ``environment``, one per node; maybe none."""
        columns = ["command_id", "hostname", "started_at"]
        found = self.tables.get("environment", pd.DataFrame(columns=columns))
        known = found.dropna(subset="started_at").sort_values("started_at", kind="stable")
        newest = known["command_id"].iloc[-1:]
        return found[found["command_id"].isin(newest)].drop_duplicates("hostname")

    @property
    def tested(self) -> list[str]:
        """The outcome of the experiment's own tests, in words."""
        return [text for each in self.sections for text in each.certainty]

    @cached_property
    def calls(self) -> tuple[int, int] | None:
        """How many of the calls that were asked for are stored, and how many were asked for.

        None for a matrix, and for an experiment that is not a function.
        """
        table = next((table for table in self.declared.tables if table.open), None)
        if table is None or self.declared.asked is None or self.varied:
            return None
        asked, rows = set(self.declared.asked()), self.tables.get(table.name)
        stored = () if rows is None else rows[table.columns[0].name]
        return sum(f"{table.name}/{call}" in asked for call in stored), len(asked)

    @cached_property
    def varied(self) -> dict[str, list[str]]:
        """The values of each varied key of the matrix, as text; seeds are among them."""
        return varied(self.tables)

    def count_points(self, *, seeds: bool) -> int:
        """Return the number of different points of a matrix apart from seeds, or of its seeds."""
        parts = [[(key, value) for key, value in point.items() if is_seed(key) == seeds]
                 for point in points(self.tables)]  # fmt: skip
        return len(set(map(frozenset, parts)))

    @property
    def seeds_needed(self) -> int:
        """The seeds with which the paired tests can tell a winner on every axis of the matrix."""
        left_out = self.search.keys if self.search is not None else ()
        counts = [len(v) for k, v in self.varied.items() if not is_seed(k) and k not in left_out]
        most = max(counts, default=2)
        return runs_needed(most * (most - 1) // 2)

    @cached_property
    def monitors(self) -> dict[str, str]:
        """The monitored columns of its trainings and its sweep's metric, each with its mode.

        There are none if the configuration cannot be read.
        """
        found = None
        with suppress(ConfigError):
            found = load_yaml(self.configuration, "config.yaml")
        return monitors_of(found if isinstance(found, dict) else {})


def better_by_name(name: str) -> Literal["lower", "higher", ""]:
    """Return ``lower`` or ``higher`` as the name of a metric tells; empty if it does not."""
    if _LOWER.search(name) and not _RATE.search(name):
        return "lower"
    return "higher" if _HIGHER.search(name) or _RATE.search(name) else ""


def monitors_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the monitored columns ``eval_...`` of a configuration, with ``lower`` or ``higher``.

    Monitors are the sections that are named so; any other content of them is ignored. The metric of
    a sweep counts, too, and comes first.
    """
    found: dict[str, str] = {}
    if isinstance(sweep := settings.get("sweep"), Mapping):
        metric = str(sweep.get("metric"))
        better = _DIRECTIONS.get(str(sweep.get("mode"))) or better_by_name(metric)
        if metric.startswith(PREFIX) and better:
            found[metric] = better
    for name, value in settings.items():
        if not isinstance(value, Mapping):
            continue
        if name == "monitor" and isinstance(own := value.get("metric"), str):
            better = _DIRECTIONS.get(str(value.get("mode"))) or better_by_name(own)
            found[f"{PREFIX}{own}"] = better or "lower"
        else:
            found |= monitors_of(value)
    return found


def held_out_columns(
    names: Iterable[str],
    declared: Sequence[Column] = (),
    monitors: Mapping[str, Any] = MappingProxyType({}),
) -> list[Column]:
    """Return the held-out metrics among the names of columns, the most important first.

    Monitored metrics come first, then those that are declared with a direction, then others, each
    time with the loss last. ``better`` is what is declared, else the monitor's mode, else what the
    name tells; it may be empty. Declarations of other columns are ignored.
    """
    known = {each.name: each for each in declared if each.name.startswith(PREFIX)}
    places = {name: place for place, name in enumerate([*monitors, *known])}

    def importance(column: Column) -> tuple[bool, bool, bool, int]:
        name = column.name
        is_loss, place = name == f"{PREFIX}loss", places.get(name, len(places))
        return name not in monitors, not column.better, is_loss, place

    found = [known.get(n, Column(n, "real", "")) for n in names if n.startswith(PREFIX)]
    return [
        replace(each, better=each.better or monitors.get(each.name) or better_by_name(each.name))
        for each in sorted(found, key=importance)
    ]


def training_measures(
    names: Iterable[str], declared: Sequence[Column], monitors: Mapping[str, str]
) -> list[Column]:
    """Return the numbers that stand for a training, the most important first.

    They are the held-out metrics of which it is known what is better; without any, the loss.
    """
    names = list(names)
    found = [each for each in held_out_columns(names, declared, monitors) if each.better]
    return found or [each for each in (LOSS,) if each.name in names]


def staged(tables: Tables, name: str) -> pd.DataFrame:
    """Return the rows that are not of sweeps; the table ``trials`` has the stage of a row."""
    table = tables.get(name, pd.DataFrame())
    if table.empty:
        return pd.DataFrame(columns=["stage", "trial_id", "step"])
    if "stage" not in table:
        trials = tables.get("trials", pd.DataFrame({"trial_id": [], "stage": []}))
        stages = table["trial_id"].map(dict(zip(trials["trial_id"], trials["stage"], strict=True)))
        names = table["trial_id"].astype(str).str.partition("@")[0]
        table = table.assign(stage=stages.where(stages.notna(), names))
    return table[table["stage"] != SWEEP]
