"""``raypipe compare``: what differs between runs in configuration, environment and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raypipe.commands.declarations import about
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
from raypipe.store.tables import COMMAND_ID, RUN_ID, VARIANT, by_name

if TYPE_CHECKING:
    from raypipe.report.best import Headline

#: columns of the environment that differ between any two runs
_OWN = (RUN_ID.name, VARIANT.name, COMMAND_ID.name, "command", "started_at")
#: columns of the blocks in addition to the runs
_HEADINGS = frozenset({"key", "result", "row"})
#: rows that are shown, and rows of a table of which no number is declared to be better
_MOST_ROWS, _MOST_UNDECLARED = 60, 100


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
    def differs(self) -> bool:
        """Whether the runs have different numbers."""
        return len(set(self.values)) > 1

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
    none; ``best`` the best points of each run by each number that several points have.
    """

    runs: tuple[Summary, ...]
    configuration: Mapping[str, tuple[Any, ...]]
    environment: Mapping[str, tuple[Any, ...]]
    results: tuple[Measure, ...]
    best: Mapping[str, tuple[Headline | None, ...]]

    @property
    def names(self) -> list[str]:
        """A short name of each run: the last part of its path, if these differ."""
        paths = [each.run.shown for each in self.runs]
        last = [path.rstrip("/").rpartition("/")[2] for path in paths]
        is_clear = len(set(last)) == len(last) and not _HEADINGS.intersection(last)
        return last if is_clear else paths

    def as_json(self) -> dict[str, Any]:
        """Return plain values: lists in the order of the runs."""
        return {
            "runs": [{"run_dir": each.run.shown, "status": each.status} for each in self.runs],
            "configuration": {key: list(each) for key, each in self.configuration.items()},
            "environment": {key: list(each) for key, each in self.environment.items()},
            "results": [{**vars(each), "counts": list(each.counts)} for each in self.results],
            "best": {
                name: [each and each.leaders for each in bests] for name, bests in self.best.items()
            },
        }

    def text(self, width: int | None) -> str:
        """Return the comparison for a reader, as wide as the terminal."""
        names = self.names
        runs = zip(names, self.runs, strict=True)
        blocks = ["\n".join(f"{name}: {each.run.shown}, {each.status}" for name, each in runs)]
        for title, differences in (
            ("configuration", self.configuration),
            ("environment", self.environment),
        ):
            rows = [
                {"key": key, **dict(zip(names, map(cell, values), strict=True))}
                for key, values in differences.items()
            ]
            blocks.append(_block(title, rows, width))
        differing = [each for each in self.results if each.differs]
        rows = [
            {
                "result": f"{each.table}.{each.column}",
                "row": each.row,
                **dict(zip(names, each.cells, strict=True)),
            }
            for each in differing[:_MOST_ROWS]
        ]
        blocks.append(_block("results", rows, width))
        if self.best:
            lines = ["best setting of each run:"]
            for metric, bests in self.best.items():
                lines.append(metric)
                for name, best in zip(names, bests, strict=True):
                    value = "none" if best is None else f"{best.mean:.5g} ({best.text})"
                    lines.append(wrapped(f"  {name}: {value}", width, "    "))
            blocks.append("\n".join(lines))
        blocks += _averaged(self)
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
        summaries = tuple(summary(run) for run in runs)
        configurations = [_configuration(run) for run in runs]
    except OSError as error:
        raise ConfigError(f"compare: a run directory cannot be read: {error}") from error
    bests = [{each.label_of_metric: each for each in about(run).bests} for run in runs]
    metrics = dict.fromkeys(name for own in bests for name, each in own.items() if each.leaders)
    return Comparison(
        summaries,
        _differences(configurations),
        _differences([_environment(each) for each in summaries]),
        tuple(_measures(runs)),
        {name: tuple(own.get(name) for own in bests) for name in metrics},
    )


def _block(title: str, rows: Sequence[Mapping[str, str]], width: int | None) -> str:
    if not rows:
        return f"{title}: no difference"
    kept = [name for name in rows[0] if name != "row"]
    how = "everything with --json"
    shown = view(rows, width, whole=True, first=kept, kept=len(kept), how=how)
    return f"{title}:\n{shown}"


def _averaged(found: Comparison) -> list[str]:
    """Return a note per table that is averaged over seeds: the number of seeds in each run."""
    notes = []
    for table in dict.fromkeys(each.table for each in found.results if each.counts):
        counts = [each.counts for each in found.results if each.table == table]
        texts = []
        for name, column in zip(found.names, zip(*counts, strict=True), strict=True):
            known = sorted({count for count in column if count}) or [0]
            ends = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
            texts.append(f"{ends} in {name}")
        notes.append(f"{table}: means over seeds: {', '.join(texts)}")
    return notes


def _differences(found: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    keys = dict.fromkeys(key for each in found for key in each)
    values = {key: tuple(each.get(key) for each in found) for key in keys}
    return {k: v for k, v in values.items() if any(one != v[0] for one in v)}


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
    parts = {
        name: [tables.read_arrow(run, name) for run in runs]
        for name in names
        if name not in core or not core[name].partitioned
    }
    declared: dict[str, dict[str, str]] = {}
    for name in parts:
        columns = core[name].columns if name in core else ()
        declared[name] = {column.name: column.better for column in columns if column.better}
        for run in runs:
            declared[name] |= tables.measures(run, name)
    if not any(better for name, better in declared.items() if name not in core):
        declared |= {name: _numbers(each) for name, each in parts.items() if name not in core}
    return [
        measure
        for name, better in declared.items()
        if better
        for measure in _of_table(name, better, parts[name])
    ]


def _numbers(parts: Sequence[pa.Table]) -> dict[str, str]:
    """Return the real numbers of a short table, apart from times and axes."""
    axes = _axes(parts)
    for part in parts:
        rows = {_key(row, axes) for row in part.to_pylist()} if axes else part
        if len(rows) > _MOST_UNDECLARED:
            return {}
    numbers = [
        each.name for part in parts for each in part.schema if pa.types.is_floating(each.type)
    ]
    return {name: "" for name in numbers if not name.endswith("_s") and name not in axes}


def _axes(parts: Sequence[pa.Table]) -> list[str]:
    """Return the columns that identify a setting; none if rows are not points that vary a seed."""
    known = [part for part in parts if part.num_rows]
    axes = dict.fromkeys(name for part in parts for name in tables.axes(part.schema))
    are_points = all(SEED in p.column_names and tables.axes(p.schema) for p in known)
    return [VARIANT.name, *axes] if known and are_points else []


def _of_table(name: str, better: Mapping[str, str], parts: Sequence[pa.Table]) -> list[Measure]:
    rows: list[list[dict[str, Any]]] = [part.to_pylist() for part in parts]
    axes = _axes(parts)
    keys = axes or _keys(parts, rows)
    grouped: list[dict[tuple[str, ...], list[dict[str, Any]]]] = [{} for _ in rows]
    for groups, of_run in zip(grouped, rows, strict=True):
        for row in of_run:
            groups.setdefault(_key(row, keys), []).append(row)
    known = list(dict.fromkeys(key for groups in grouped for key in groups))
    varied = [len({key[place] for key in known}) > 1 for place in range(len(keys))]
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


def _keys(parts: Sequence[pa.Table], rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the columns that tell the rows of each run apart: texts, then whole numbers."""
    fields = [each for part in parts for each in part.schema]
    texts = [each.name for each in fields if pa.types.is_string(each.type)]
    numbers = [each.name for each in fields if pa.types.is_integer(each.type)]
    keys: list[str] = []
    distinct = [min(1, len(of_run)) for of_run in rows]
    for name in dict.fromkeys((*texts, *numbers)):
        if name in (RUN_ID.name, COMMAND_ID.name):
            continue
        if all(count == len(of_run) for count, of_run in zip(distinct, rows, strict=True)):
            break
        wider = [len({_key(row, [*keys, name]) for row in of_run}) for of_run in rows]
        if wider != distinct:
            keys.append(name)
            distinct = wider
    return keys


def _key(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell(row.get(name)) for name in names)


def _known(rows: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    """Return the numbers in ascending order, so that their sum does not depend on that of rows."""
    return sorted(row[column] for row in rows if isinstance(row.get(column), int | float))
