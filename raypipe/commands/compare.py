"""``raypipe compare``: what differs between runs in configuration, environment and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raypipe.commands.declarations import results_of
from raypipe.commands.results import newest_environment
from raypipe.commands.summary import Summary, summary
from raypipe.commands.table_view import cell, view, wrapped
from raypipe.config.matrix import SEED
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.graph.tables import CORE
from raypipe.integrations.tracking import flat
from raypipe.stats import finite_or_none
from raypipe.store import tables
from raypipe.store.run_directory import BASE, RunDirectory
from raypipe.store.tables import ADDED, COMMAND_ID, RUN_ID, VARIANT, by_name

#: columns of the environment that differ between any two runs
_OWN = (*ADDED, "command", "started_at")
#: columns of the blocks in addition to the runs
_HEADINGS = frozenset({"key", "result", "row"})
#: rows that are shown, and rows of a table of which no number is declared to be better
_MOST_ROWS, _MOST_UNDECLARED = 60, 100

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Measure:
    """A number of a row in each run, None where there is none.

    ``better`` is lower, higher, or empty if that is not declared. ``counts`` are the repetitions
    that each number is the mean of; empty if the row is not averaged over seeds.
    """

    table: str
    row: str
    column: str
    better: str
    values: tuple[float | None, ...]
    counts: tuple[int, ...] = ()

    @property
    def cells(self) -> list[str]:
        """The numbers, each but the first with its difference to the first."""
        first, cells = self.values[0], []
        for place, value in enumerate(self.values):
            text = "" if value is None else f"{value:.5g}"
            if place and value is not None and first is not None and value != first:
                verdict = ", better" if (value < first) == (self.better == "lower") else ", worse"
                text += f" ({value - first:+.3g}{verdict if self.better else ''})"
            cells.append(text)
        return cells


@dataclass(frozen=True)
class Comparison:
    """Differences between runs, and all measures that any of them has.

    ``configuration`` and ``environment`` have the value of a key in each run, None where it has
    none; ``best`` the best points of each run and their result in words, by each number that
    several points have.
    """

    runs: Sequence[Mapping[str, str]]
    configuration: Mapping[str, Sequence[Any]]
    environment: Mapping[str, Sequence[Any]]
    results: Sequence[Measure]
    best: Mapping[str, Sequence[Mapping[str, Any] | None]]

    def text(self, width: int | None) -> str:
        """Return the comparison for a reader, as wide as the terminal."""
        names = _names([run["run_dir"] for run in self.runs])
        lines = [
            f"{n}: {r['run_dir']}, {r['status']}" for n, r in zip(names, self.runs, strict=True)
        ]
        blocks = ["\n".join(lines)]

        def of_runs(cells: Sequence[str]) -> dict[str, str]:
            return dict(zip(names, cells, strict=True))

        for title in ("configuration", "environment"):
            values: Mapping[str, Sequence[Any]] = getattr(self, title)
            rows = [{"key": key, **of_runs([cell(v) for v in own])} for key, own in values.items()]
            blocks.append(_block(title, rows, width))
        differing = [each for each in self.results if len(set(each.values)) > 1]
        rows = [
            {"result": f"{each.table}.{each.column}", "row": each.row, **of_runs(each.cells)}
            for each in differing[:_MOST_ROWS]
        ]
        blocks.append(_block("results", rows, width))
        lines = []
        for metric, bests in self.best.items():
            lines.append(metric)
            for name, best in of_runs([b["text"] if b else "none" for b in bests]).items():
                lines.append(wrapped(f"  {name}: {best}", width, "    "))
        if lines:
            blocks.append("\n".join(["best setting of each run:", *lines]))
        for table in dict.fromkeys(each.table for each in self.results if each.counts):
            counts = [each.counts for each in self.results if each.table == table]
            seeds = of_runs([_ends(of_run) for of_run in zip(*counts, strict=True)])
            texts = (f"{number} in {name}" for name, number in seeds.items())
            blocks.append(f"{table}: means over seeds: {', '.join(texts)}")
        if same := len(self.results) - len(differing):
            blocks.append(f"{same} results are the same")
        if len(differing) > _MOST_ROWS:
            blocks.append(f"{len(differing) - _MOST_ROWS} more differ: see all with --json")
        if not self.results:
            blocks.append(
                "no results to compare: no table has numbers that are declared to be better"
            )
        if not (self.configuration or self.environment or differing):
            blocks.append("nothing differs")
        return "\n\n".join(blocks)


def compare(runs: Sequence[RunDirectory]) -> Comparison:
    """Compare runs.

    Rows of two runs are the same row if the texts agree that tell the rows of a run apart, and the
    whole numbers if texts are not enough. Rows that are still alike count by their mean. Of a table
    with axes and a seed, such as the calls of a function, rows with the same axes are one row.

    Raises:
        ConfigError: a run directory cannot be read.

    """
    try:
        summaries = [summary(run) for run in runs]
        configurations = [_configuration(run) for run in runs]
    except OSError as error:
        raise ConfigError(f"compare: a run directory cannot be read: {error}") from error
    bests = [
        {
            each.label_of_metric: {"points": each.leaders, "text": f"{each.mean:.5g} ({each.text})"}
            for each in results_of(run).bests
        }
        for run in runs
    ]
    metrics = dict.fromkeys(name for own in bests for name, each in own.items() if each["points"])
    return Comparison(
        [{"run_dir": each.run.shown, "status": each.status} for each in summaries],
        _differences(configurations),
        _differences([_environment(each) for each in summaries]),
        _measures(runs),
        {name: [own.get(name) for own in bests] for name in metrics},
    )


def _names(paths: Sequence[str]) -> Sequence[str]:
    """Return a short name of each run: the last part of its path, if these differ."""
    last = [path.rstrip("/").rpartition("/")[2] for path in paths]
    is_clear = len(set(last)) == len(last) and not _HEADINGS.intersection(last)
    return last if is_clear else paths


def _block(title: str, rows: Sequence[Mapping[str, str]], width: int | None) -> str:
    if not rows:
        return f"{title}: no difference"
    kept = [name for name in rows[0] if name != "row"]
    how = "everything with --json"
    shown = view(rows, width, whole=True, first=kept, kept=len(kept), how=how)
    return f"{title}:\n{shown}"


def _ends(counts: Sequence[int]) -> str:
    """Return the smallest and the largest of some numbers of repetitions."""
    known = sorted({count for count in counts if count}) or [0]
    return str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _differences(values: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[Any]]:
    keys = dict.fromkeys(key for of_run in values for key in of_run)
    every = {key: [of_run.get(key) for of_run in values] for key in keys}
    return {key: own for key, own in every.items() if any(each != own[0] for each in own)}


def _configuration(run: RunDirectory) -> dict[str, Any]:
    """Return the resolved configuration of the newest command by dotted key."""
    try:
        text = run.read(run.config).decode()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{run.shown}/config.yaml: is damaged: {error}") from error
    values = load_yaml(text, f"{run.shown}/config.yaml")
    return flat(values) if isinstance(values, Mapping) else {}


def _environment(found: Summary) -> dict[str, Any]:
    """Return versions, hardware and code of the newest command, over all of its nodes."""
    rows = newest_environment(found.run)
    names = dict.fromkeys(name for row in rows for name in row if name not in _OWN)
    environment = {
        name: ", ".join(sorted({cell(row[name]) for row in rows if row.get(name) is not None}))
        for name in names
    }
    known = found.details
    return environment | {"profile": known.profile, "experiment's code": known.code[:12]}


def _measures(runs: Sequence[RunDirectory]) -> list[Measure]:
    """Return the measures of all tables: those declared, else the numbers of short tables."""
    core = by_name(CORE)
    names = dict.fromkeys(name for run in runs for name in run.list(run.path("results")))
    whole = [name for name in names if name not in core or not core[name].partitioned]
    parts = {name: [tables.read_arrow(run, name) for run in runs] for name in whole}
    declared: dict[str, dict[str, str]] = {}
    for name in parts:
        columns = core[name].columns if name in core else ()
        declared[name] = {column.name: column.better for column in columns if column.better}
        for part in parts[name]:
            declared[name] |= tables.better(part.schema)
    if not any(better for name, better in declared.items() if name not in core):
        declared |= {name: _numbers(each) for name, each in parts.items() if name not in core}
    every = (_of_table(name, better, parts[name]) for name, better in declared.items() if better)
    return [measure for of_table in every for measure in of_table]


def _numbers(parts: Sequence[pa.Table]) -> dict[str, str]:
    """Return the real numbers of a short table, apart from times and axes."""
    axes = _axes(parts)
    counts = (len({_key(row, axes) for row in p.to_pylist()}) if axes else len(p) for p in parts)
    if max(counts, default=0) > _MOST_UNDECLARED:
        return {}
    fields = [each for part in parts for each in part.schema]
    numbers = [each.name for each in fields if pa.types.is_floating(each.type)]
    return {name: "" for name in numbers if not name.endswith("_s") and name not in axes}


def _axes(parts: Sequence[pa.Table]) -> list[str]:
    """Return the columns that identify a setting; none if rows are not points that vary a seed."""
    known = [part for part in parts if part.num_rows]
    axes = dict.fromkeys(name for part in parts for name in tables.axes(part.schema))
    are_points = all(SEED in p.column_names and tables.axes(p.schema) for p in known)
    return [VARIANT.name, *axes] if known and are_points else []


def _of_table(name: str, better: Mapping[str, str], parts: Sequence[pa.Table]) -> list[Measure]:
    rows: list[Rows] = [part.to_pylist() for part in parts]
    axes = _axes(parts)
    keys = axes or _keys(parts, rows)
    grouped: list[dict[tuple[str, ...], Rows]] = [{} for _ in rows]
    for groups, of_run in zip(grouped, rows, strict=True):
        for row in of_run:
            groups.setdefault(_key(row, keys), []).append(row)
    known = list(dict.fromkeys(key for groups in grouped for key in groups))
    varied = [len(set(column)) > 1 for column in zip(*known, strict=True)]
    measures: list[Measure] = []
    for key in known:
        label = " ".join(part for part in key if part and part != BASE)
        if axes:  # the axes that vary with their values, such as ``C=1, gamma=0.1``
            named = [t if k == VARIANT.name else f"{k}={t}" for k, t in zip(keys, key, strict=True)]
            label = ", ".join(text for text, is_ in zip(named, varied, strict=True) if is_)
        for column, direction in better.items():
            numbers = [_known(groups.get(key, ()), column) for groups in grouped]
            values = tuple(finite_or_none(sum(of) / len(of)) if of else None for of in numbers)
            if any(value is not None for value in values):
                counts = tuple(map(len, numbers)) if axes else ()
                measures.append(Measure(name, label, column, direction, values, counts))
    return measures


def _keys(parts: Sequence[pa.Table], rows: Sequence[Rows]) -> list[str]:
    """Return the columns that tell the rows of each run apart: texts, then whole numbers."""
    fields = [f for p in parts for f in p.schema if f.name not in (RUN_ID.name, COMMAND_ID.name)]
    texts = [each.name for each in fields if pa.types.is_string(each.type)]
    numbers = [each.name for each in fields if pa.types.is_integer(each.type)]

    def distinct(names: Sequence[str]) -> list[int]:
        return [len({_key(row, names) for row in of_run}) for of_run in rows]

    keys: list[str] = []
    for name in dict.fromkeys((*texts, *numbers)):
        if distinct(keys) == [len(of_run) for of_run in rows]:
            break
        if distinct([*keys, name]) != distinct(keys):
            keys.append(name)
    return keys


def _key(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell(row.get(name)) for name in names)


def _known(rows: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    """Return the numbers in ascending order, so that their sum does not depend on that of rows."""
    return sorted(row[column] for row in rows if isinstance(row.get(column), int | float))
