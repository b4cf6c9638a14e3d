"""Read a run for its report: the tables with their declarations, the request, the versions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.matrix import SEED, is_seed, text_value
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.redaction import without_credentials
from raypipe.report.comparison import variants_of
from raypipe.report.evaluations import EvaluationCurve, evaluations
from raypipe.report.headlines import Headline, headlines, is_baseline
from raypipe.report.measures import monitors_of, training_measures
from raypipe.report.search import search_headlines
from raypipe.report.sections import Section
from raypipe.report.sweep_summary import sweep_headlines
from raypipe.report.sweep_trials import SWEEP, SweepResults, sweeps
from raypipe.report.table_shape import (
    MATRIX_SEED,
    Shape,
    as_numbers,
    plain,
    point_label,
    shape_of,
)
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import KeyResult
from raypipe.store.tables import VARIANT, Column, Table, null_cells

#: rows of a number that is not finite that are named
_MOST_NAMED = 3

Tables = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Declarations:
    """An experiment's own description of itself.

    Args:
        sentence: what it does, or empty.
        tables: its tables.
        step_metrics: the columns that its trainings add to ``steps``.
        core: names of the tables that every run has; a table that is in neither is undeclared.
        asked: returns the units that the newest command asked for, if that differs by command.

    """

    sentence: str = ""
    tables: Sequence[Table] = ()
    step_metrics: Sequence[Column] = ()
    core: frozenset[str] | None = None
    asked: Callable[[], Collection[str]] | None = None


@dataclass(frozen=True)
class Results:
    """A table of the experiment with its rows, joined with the values of the matrix."""

    table: Table
    rows: pd.DataFrame
    axes: Sequence[str] | None

    @cached_property
    def shape(self) -> Shape:
        """The roles of its columns."""
        return shape_of(self.table, self.rows, self.axes)

    @property
    def own(self) -> pd.DataFrame:
        """The rows that are not of a baseline."""
        return self.rows[~is_baseline(self.table, self.rows[list(self.shape.axes)])]

    @cached_property
    def headlines(self) -> list[Headline]:
        """The best point by each number that can be better."""
        return headlines(self.table, self.rows, self.shape)


@dataclass(frozen=True)
class Calls:
    """The number of calls that the newest command asked for, and of those that are stored."""

    done: int
    total: int

    @property
    def missing(self) -> int:
        """The number of calls that are not stored."""
        return self.total - self.done


@dataclass(frozen=True)
class About:
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

    @cached_property
    def asked_command(self) -> str:
        """The newest command as it was given, or empty."""
        environment = self.tables.get("environment")
        if environment is None or not {"command", "started_at"} <= {*environment.columns}:
            return ""
        known = environment[environment["command"].notna() & environment["started_at"].notna()]
        ordered = known.sort_values("started_at", kind="stable")
        return str(ordered["command"].iloc[-1]) if len(ordered) else ""

    @cached_property
    def sweeps(self) -> list[SweepResults]:
        """The swept stages with their trials."""
        return list(sweeps(self.tables))

    @property
    def only_swept(self) -> bool:
        """Whether the run is a sweep and nothing else."""
        return bool(self.sweeps) and not self.headlines and not self.evaluations

    @cached_property
    def bests(self) -> list[Headline]:
        """The best results, the most important first: all views of a run name these.

        They are those of :attr:`headlines`; without any, of its trainings, then of its sweeps.
        """
        return self.headlines or self._trained() or list(sweep_headlines(self.sweeps))

    @property
    def key_result(self) -> KeyResult | None:
        """The first of the best results, which stands for the run; None without any."""
        return self.bests[0].key_result if self.bests else None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The resolved configuration; empty if it cannot be read."""
        try:
            found = load_yaml(self.configuration, "config.yaml")
        except ConfigError:
            return {}
        return found if isinstance(found, dict) else {}

    def setting(self, key: str) -> Any:
        """Return the setting at a dotted key; None if there is none."""
        found: Any = self.settings
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @cached_property
    def seeds(self) -> dict[str, Any]:
        """The settings named ``seed``, by dotted key."""
        return {
            key: value
            for key, value in _seeds(self.settings, "")
            if not key.startswith(("matrix.", "sweep."))
        }

    @cached_property
    def results(self) -> list[Results]:
        """The tables of the experiment that have rows."""
        return [
            joined(table, with_nulls(table, self.tables[table.name]), self.tables)
            for table in self._own_tables()
            if table.name in self.tables and len(self.tables[table.name])
        ]

    @cached_property
    def headlines(self) -> list[Headline]:
        """The best points of a search and of all tables of the experiment, else of trainings."""
        sought = search_headlines(self.tables)
        said = {best.metric for best in sought}
        own = [best for results in self.results for best in results.headlines]
        own = [best for best in own if best.metric not in said]
        return [*sought, *own] or list(self.training_headlines.values())

    @cached_property
    def not_finite(self) -> list[str]:
        """How many results are NaN or infinite, and where; they are in no mean and never best."""
        return [text for results in self.results for text in self._not_finite(results)]

    def _not_finite(self, results: Results) -> Iterator[str]:
        table, rows, shape = results.table, results.rows, results.shape
        named = [column.name for column in table.columns if column.better]
        if table.open and not named:
            named = [column.name for column in shape.numbers]
        where = [name for name in (*shape.groups, *shape.axes, *shape.seeds)
                 if rows[name].nunique(dropna=False) > 1]  # fmt: skip
        for name in named:
            values = as_numbers(rows[name]) if name in rows else pd.Series(dtype=float)
            bad = ~np.isfinite(values)
            if bad.any() and self.directory is not None:
                bad &= ~null_cells(self.directory, table.name, name)
            if not bad.any():
                continue
            texts = []
            for kind, own in values[bad].groupby(values[bad].map(str), sort=False):
                labels = [without_credentials(point_label(dict(rows.loc[at, where])))
                          or f"row {at + 1}" for at in own.index[:_MOST_NAMED]]  # fmt: skip
                more = len(own) - len(labels)
                labels += [f"{more} more"] * (more > 0)
                listed = " and ".join(filter(None, [", ".join(labels[:-1]), labels[-1]]))
                texts.append(f"{'NaN' if kind == 'nan' else kind} at {listed}")
            count = f"any of {len(rows)}" if bad.all() else f"{bad.sum()} of {len(rows)}"
            rest = "row" if len(rows) == 1 else "rows"
            yield f"{table.name}.{name} is not finite in {count} {rest}: {'; '.join(texts)}."

    @cached_property
    def training_headlines(self) -> dict[str, Headline]:
        """The best point of a matrix by each of its training stages."""
        return training_headlines(self.tables, self.declared.step_metrics, self.monitors)

    @cached_property
    def calls(self) -> Calls | None:
        """The calls of a function; None of another experiment, or of a matrix."""
        table = next((table for table in self.declared.tables if table.open), None)
        if table is None or self.declared.asked is None or variants_of(self.tables):
            return None
        asked, rows = set(self.declared.asked()), self.tables.get(table.name)
        keys = (
            [] if rows is None else [f"{table.name}/{name}" for name in rows[table.columns[0].name]]
        )
        return Calls(len(asked.intersection(keys)), len(asked))

    @property
    def losing(self) -> list[Headline]:
        """The best points that are not better than the strongest baseline."""
        return [best for best in self.headlines if best.baseline and best.gain <= 0]

    @property
    def tested(self) -> list[str]:
        """The outcome of the experiment's own tests, in words.

        They are of one point, so there are none in a matrix, whose points have intervals over
        seeds.
        """
        return [] if self.varied else [text for each in self.sections for text in each.certainty]

    @cached_property
    def evaluations(self) -> list[EvaluationCurve]:
        """The held-out metrics of its trainings."""
        return evaluations(self.tables, self.declared.step_metrics, SWEEP, self.monitors)

    @cached_property
    def chosen_steps(self) -> dict[str, tuple[float, bool]]:
        """The step of the model that held-out data chose, and whether the training stopped early.

        By trial; a training that is left out kept the model of its last step.
        """
        trials = self.tables.get("trials", pd.DataFrame())
        if "best_step" not in trials:
            return {}
        known = trials.dropna(subset=["best_step"])
        values = zip(known["trial_id"], known["best_step"], known["stopped_early"], strict=True)
        return {str(trial): (float(step), bool(stopped)) for trial, step, stopped in values}

    @cached_property
    def monitors(self) -> dict[str, str]:
        """The monitored columns of its trainings and its sweep's metric, each with its mode."""
        return monitors_of(self.settings)

    @cached_property
    def varied(self) -> dict[str, list[str]]:
        """The values of each varied key of the matrix, as text; seeds are among them."""
        found: dict[str, dict[str, None]] = {}
        for values in variants_of(self.tables).values():
            for key, value in values.items():
                found.setdefault(key, {})[value] = None
        return {key: list(values) for key, values in found.items()}

    def _trained(self) -> list[Headline]:
        """Return the best training by the number that stands for trainings."""
        trials = self.tables.get("trials")
        if trials is None or not {"trial_id", "stage", "status"} <= {*trials.columns}:
            return []
        rows = trials[(trials["status"] == "succeeded") & (trials["stage"] != SWEEP)]
        known = [str(name) for name in rows.columns if rows[name].notna().any()]
        found = training_measures(known, self.declared.step_metrics, self.monitors)[:1]
        table = Table("trials", "a training", tuple(found))
        own = plain(rows[["trial_id", *(column.name for column in found)]])
        return Results(table, own, ["trial_id"]).headlines

    def _own_tables(self) -> Iterator[Table]:
        yield from self.declared.tables
        if self.declared.core is not None:
            known = {table.name for table in self.declared.tables} | self.declared.core
            yield from (Table(name, "") for name in self.tables if name not in known)


def training_headlines(
    tables: Tables, declared: Sequence[Column], monitors: Mapping[str, str]
) -> dict[str, Headline]:
    """Return the best point of each training stage that a matrix varies, by stage.

    It is that of the first number of :func:`training_measures`, a mean over seeds.
    """
    trials = tables.get("trials")
    variants = list(variants_of(tables))
    if trials is None or trials.empty or not variants:
        return {}
    found = {}
    varied = trials[trials[VARIANT.name].isin(variants)]
    for stage, rows in varied[varied["status"] == "succeeded"].groupby("stage", sort=False):
        known = [str(name) for name in rows.columns if rows[name].notna().any()]
        for column in training_measures(known, declared, monitors)[:1]:
            table = Table("trials", "a training", (column,))
            own = rows[[VARIANT.name, column.name]]
            for best in joined(table, own, tables).headlines:
                found[str(stage)] = best
    return found


def with_nulls(table: Table, rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows in which null is a value of an axis like others, if the axes are arguments.

    The axes of a table of calls are arguments of a function, of which null may be one. In other
    tables a missing value says that the axis does not apply.
    """
    if not table.open:
        return rows
    columns = {}
    for name in table.axes:
        if name in rows.columns and rows[name].isna().any() and rows[name].notna().any():
            values = rows[name].astype(object)
            columns[name] = values.where(values.notna(), "null")
    return rows.assign(**columns)


def joined(table: Table, rows: pd.DataFrame, tables: Tables) -> Results:
    """Return rows with a column for each key of the matrix that they depend on; keys are axes."""
    variants = variants_of(tables)
    if VARIANT.name not in rows.columns or not variants:
        return Results(table, plain(rows), None)
    names = rows[VARIANT.name].astype(str)
    own: tuple[str, ...] = table.axes
    if not own:
        own = shape_of(table, plain(rows[names == names.iloc[0]])).axes
    keys = list(dict.fromkeys(key for name in names.unique() for key in variants.get(name, {})))
    if table.open:  # its axes are the arguments that the keys vary
        keys = [key for key in keys if key.removeprefix("arguments.") not in table.axes]
    columns = {
        MATRIX_SEED if key == SEED else key: _column(names, variants, key)
        for key in keys
        if key not in rows.columns or key == SEED
    }
    rows = rows.assign(**columns)
    compared = [key for key in columns if key != MATRIX_SEED and not is_seed(key)]
    return Results(table, plain(rows), [*own, *compared])


def _column(
    names: pd.Series[str], variants: Mapping[str, Mapping[str, str]], key: str
) -> list[Any]:
    """Return the value of a key for each row: numbers if all values are, otherwise texts."""
    texts = {name: values.get(key) for name, values in variants.items()}
    values = {name: None if text is None else text_value(text) for name, text in texts.items()}
    are_numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in values.values()
        if value is not None
    )
    chosen: Mapping[str, Any] = values if are_numbers else texts
    return [chosen.get(name) for name in names]


def _seeds(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _seeds(value, f"{prefix}{name}.")
        elif name == SEED:
            yield f"{prefix}{name}", value
