"""Read a run: its tables with their declarations, and the best results that every view names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.redaction import without_credentials
from raypipe.report.best import Headline, Results, as_numbers, joined, plain, point_label
from raypipe.report.formatting import counted, listed, number
from raypipe.report.measures import monitors_of, training_measures
from raypipe.report.sections import Section
from raypipe.report.studies import Swept, search_headlines, sweeps
from raypipe.report.trainings import SWEEP, EvaluationCurve, evaluations
from raypipe.report.variants import Tables, variants_of, varied
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import KeyResult
from raypipe.store.tables import VARIANT, Column, Table, null_cells

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
class Calls:
    """The number of calls that the newest command asked for, and of those that are stored."""

    done: int
    total: int


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

        They are those of :attr:`headlines`; without any, of its trainings, then of its sweeps.
        """
        return self.headlines or self._trained() or self.recommended

    @property
    def key_result(self) -> KeyResult | None:
        """The first of the best results, which stands for the run; None without any."""
        return self.bests[0].key_result if self.bests else None

    @cached_property
    def headlines(self) -> list[Headline]:
        """The best points of a search and of all tables of the experiment, else of trainings."""
        sought = search_headlines(self.tables)
        named = {best.metric for best in sought}
        own = [best for results in self.results for best in results.headlines]
        own = [best for best in own if best.metric not in named]
        return [*sought, *own] or list(self.training_headlines.values())

    @cached_property
    def results(self) -> list[Results]:
        """The tables of the experiment that have rows."""
        declared = list(self.declared.tables)
        if self.declared.core is not None:
            known = {table.name for table in declared} | self.declared.core
            declared += [Table(name, "") for name in self.tables if name not in known]
        return [
            joined(table, self.tables[table.name], self.tables)
            for table in declared
            if table.name in self.tables and len(self.tables[table.name])
        ]

    @cached_property
    def trained(self) -> dict[str, Results]:
        """The trainings of each stage of a matrix, with the number that stands for them."""
        trials = self.tables.get("trials")
        if trials is None or trials.empty or not self.varied:
            return {}
        known = trials["variant"].isin(list(variants_of(self.tables)))
        done = trials[known & (trials["status"] == "succeeded")]
        found = {}
        for stage, rows in done.groupby("stage", sort=False):
            if columns := self._measures(rows):
                table = Table(f"trials-{stage}", "a training", tuple(columns))
                own = rows[[VARIANT.name, *(column.name for column in columns)]]
                found[str(stage)] = joined(table, own, self.tables)
        return found

    @cached_property
    def training_headlines(self) -> dict[str, Headline]:
        """The best point of a matrix by each of its training stages, a mean over seeds."""
        return {
            stage: replace(best, table="trials")
            for stage, each in self.trained.items()
            for best in each.headlines
        }

    def _trained(self) -> list[Headline]:
        """Return the best training by the number that stands for trainings."""
        trials = self.tables.get("trials")
        if trials is None or not {"trial_id", "stage", "status"} <= {*trials.columns}:
            return []
        rows = trials[(trials["status"] == "succeeded") & (trials["stage"] != SWEEP)]
        columns = self._measures(rows)
        own = plain(rows[["trial_id", *(column.name for column in columns)]])
        return Results(Table("trials", "a training", tuple(columns)), own, ["trial_id"]).headlines

    def _measures(self, trials: pd.DataFrame) -> list[Column]:
        """Return the first number that stands for trainings, if there is any."""
        known = [str(name) for name in trials.columns if trials[name].notna().any()]
        return training_measures(known, self.declared.step_metrics, self.monitors)[:1]

    @cached_property
    def sweeps(self) -> list[Swept]:
        """The swept stages with their trials."""
        return sweeps(self.tables)

    @property
    def recommended(self) -> list[Headline]:
        """The recommended point of each swept stage."""
        return [best for sweep in self.sweeps if (best := sweep.headline) is not None]

    @property
    def only_swept(self) -> bool:
        """Whether the run is a sweep and nothing else."""
        return bool(self.sweeps) and not self.headlines and not self.evaluations

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
                texts.append(f"{'NaN' if kind == 'nan' else kind} at {listed(labels)}")
            count = "any" if bad.all() else str(bad.sum())
            where_text = f"{count} of {counted(len(rows), 'row')}"
            yield f"{table.name}.{name} is not finite in {where_text}: {'; '.join(texts)}."

    @property
    def beaten(self) -> list[str]:
        """A sentence for each result that is not better than a baseline of the same run.

        The end of a command warns of them; in the report the headline numbers have the distance.
        """
        lost: dict[tuple[str, str], list[str]] = {}
        for best in self.headlines:
            if best.baseline is not None and best.baseline.gain <= 0:
                subject = f"{best.leaders or 'The best row'} {'are' if best.ties > 1 else 'is'}"
                lost.setdefault((subject, best.baseline.label), []).append(best.name)
        texts = [
            f"{subject} not better than the baseline {baseline} in {listed(names)}."
            for (subject, baseline), names in lost.items()
        ]
        trials: dict[str, str] = {}
        for each in self.evaluations:
            if each.column.better and not each.beats_baseline(each.best):
                own, rival = (
                    number(float(v[each.best])) for v in (each.values, each.baseline_values)
                )
                trials.setdefault(
                    each.trial,
                    f"{each.trial} is not better than its baseline: {each.name} {own}, "
                    f"{each.baseline} {rival}.",
                )
        return [*texts, *trials.values()]

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

    @property
    def tested(self) -> list[str]:
        """The outcome of the experiment's own tests, in words.

        They are of one point, so there are none in a matrix, whose points have intervals over
        seeds.
        """
        return [] if self.varied else [text for each in self.sections for text in each.certainty]

    @cached_property
    def calls(self) -> Calls | None:
        """The calls of a function; None of another experiment, or of a matrix."""
        table = next((table for table in self.declared.tables if table.open), None)
        if table is None or self.declared.asked is None or self.varied:
            return None
        asked, rows = set(self.declared.asked()), self.tables.get(table.name)
        names = pd.Series(dtype=str) if rows is None else rows[table.columns[0].name]
        keys = [f"{table.name}/{name}" for name in names]
        return Calls(len(asked.intersection(keys)), len(asked))

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
