"""Which results stand for a run: its tables with their declarations, and the best of them.

The report, ``show``, ``ls``, ``compare``, the end of a command and Python all ask this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.redaction import without_credentials
from raypipe.report.best import (
    Headline,
    Results,
    Tables,
    as_numbers,
    joined,
    plain,
    point_label,
    variants_of,
)
from raypipe.report.comparison import varied
from raypipe.report.formatting import counted, listed
from raypipe.report.measures import monitors_of, training_measures
from raypipe.report.parts import Section
from raypipe.report.studies import Swept, search_headlines, sweeps
from raypipe.report.trainings import SWEEP, EvaluationCurve, evaluations
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import KeyResult
from raypipe.store.tables import Column, Table, read_arrow

#: rows of a number that is not finite that are named
_MOST_NAMED = 3


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

    @cached_property
    def bests(self) -> list[Headline]:
        """The best results, the most important first: all views of a run name these.

        They are those of :attr:`headlines`; without any, those that its sweeps recommend.
        """
        return self.headlines or self.recommended

    @property
    def key_result(self) -> KeyResult | None:
        """The first of the best results, which stands for the run; None without any."""
        return self.bests[0].key_result if self.bests else None

    @cached_property
    def headlines(self) -> list[Headline]:
        """The best results of its search and of its tables; without any, of its trainings."""
        return self.measured or self.training_headlines

    @cached_property
    def measured(self) -> list[Headline]:
        """The best points of a search and of all tables of the experiment."""
        sought = search_headlines(self.tables)
        named = {best.metric for best in sought}
        own = [best for results in self.results for best in results.headlines]
        return [*sought, *(best for best in own if best.metric not in named)]

    @cached_property
    def results(self) -> list[Results]:
        """The tables of the experiment that have rows."""
        declared = list(self.declared.tables)
        if self.declared.core is not None:
            known = {table.name for table in declared} | self.declared.core
            declared += [Table(name, "") for name in self.tables if name not in known]
        written = [table for table in declared if len(self.tables.get(table.name, ()))]
        return [joined(table, self.tables[table.name], self.tables) for table in written]

    @cached_property
    def trained(self) -> list[Results]:
        """Its trainings with the number that stands for them; of a matrix those of each stage."""
        trials = self.tables.get("trials", pd.DataFrame())
        if not {"trial_id", "stage", "status"} <= {*trials.columns}:
            return []
        done = trials[(trials["status"] == "succeeded") & (trials["stage"] != SWEEP)]
        stages: Any = [("trials", done)]
        if self.varied:
            done = done[done["variant"].isin(list(variants_of(self.tables)))]
            stages = [(f"trials-{stage}", own) for stage, own in done.groupby("stage")]
        found = []
        for name, own in stages:
            known = [str(column) for column in own if own[column].notna().any()]
            measures = training_measures(known, self.declared.step_metrics, self.monitors)[:1]
            table, names = Table(name, "a training", tuple(measures)), [c.name for c in measures]
            if measures and self.varied:
                found.append(joined(table, own[["variant", *names]], self.tables))
            elif measures:
                found.append(Results(table, plain(own[["trial_id", *names]]), ["trial_id"]))
        return found

    @property
    def training_headlines(self) -> list[Headline]:
        """The best training; of a matrix the best point by each training stage."""
        found = [best for results in self.trained for best in results.headlines]
        return [replace(best, table="trials") for best in found]

    @cached_property
    def sweeps(self) -> list[Swept]:
        """The swept stages with their trials."""
        return sweeps(self.tables)

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
        return found[found["unit"].isin(list(self.declared.asked()))]

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
        for name in (name for name in named if name in rows):
            values = as_numbers(rows[name])
            is_bad = ~np.isfinite(values)
            if is_bad.any() and self.directory is not None:
                cells = read_arrow(self.directory, table.name).column(name)
                is_bad &= cells.is_valid().to_numpy()  # NaN is a value
            texts, bad = [], values[is_bad]
            for kind, own in bad.groupby(bad.map(str), sort=False):
                labels = [without_credentials(point_label(dict(rows.loc[at, where])))
                          or f"row {at + 1}" for at in own.index[:_MOST_NAMED]]  # fmt: skip
                more = len(own) - len(labels)
                labels += [f"{more} more"] * (more > 0)
                texts.append(f"{'NaN' if kind == 'nan' else kind} at {listed(labels)}")
            if texts:
                count = f"{'any' if is_bad.all() else len(bad)} of {counted(len(rows), 'row')}"
                yield f"{table.name}.{name} is not finite in {count}: {'; '.join(texts)}."

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
        for each in self.evaluations:
            if each.column.better and not each.beats_baseline(each.best):
                text = f"{each.trial} is not better than the baseline {each.baseline} in"
                lost.setdefault(text, []).append(each.name)
        return [f"{text} {listed(names)}." for text, names in lost.items()]

    @cached_property
    def nodes(self) -> pd.DataFrame:
        """The rows of the newest command in ``environment``, one per node; maybe none."""
        found = self.tables.get("environment", pd.DataFrame())
        if not {"started_at", "command_id"} <= {*found.columns}:
            return found
        known = found.dropna(subset="started_at").sort_values("started_at", kind="stable")
        newest = known["command_id"].iloc[-1:]
        return found[found["command_id"].isin(newest)].drop_duplicates("hostname")

    @property
    def asked_command(self) -> str:
        """The newest command as it was given, or empty."""
        given = self.nodes.get("command", pd.Series(dtype=object)).dropna()
        return str(given.iloc[0]) if len(given) else ""

    @cached_property
    def evaluations(self) -> list[EvaluationCurve]:
        """The held-out metrics of its trainings."""
        return evaluations(self.tables, self.declared.step_metrics, self.monitors)

    @property
    def tested(self) -> list[str]:
        """The outcome of the experiment's own tests, in words.

        They are of one point, so there are none in a matrix, whose points have intervals over
        seeds.
        """
        return [] if self.varied else [text for each in self.sections for text in each.certainty]

    @cached_property
    def calls(self) -> tuple[int, int] | None:
        """How many of the calls that were asked for are stored, and how many were asked for.

        None of an experiment that is no function, and of a matrix.
        """
        table = next((table for table in self.declared.tables if table.open), None)
        if table is None or self.declared.asked is None or self.varied:
            return None
        asked, rows = set(self.declared.asked()), self.tables.get(table.name)
        name = table.columns[0].name
        stored = set() if rows is None else {f"{table.name}/{call}" for call in rows[name]}
        return len(asked & stored), len(asked)

    @cached_property
    def varied(self) -> dict[str, list[str]]:
        """The values of each varied key of the matrix, as text; seeds are among them."""
        return varied(self.tables)

    @cached_property
    def monitors(self) -> dict[str, str]:
        """The monitored columns of its trainings and its sweep's metric, each with its mode."""
        return monitors_of(self.settings)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The resolved configuration; empty if it cannot be read."""
        found = None
        with suppress(ConfigError):
            found = load_yaml(self.configuration, "config.yaml")
        return found if isinstance(found, dict) else {}
