"""``raypipe compare``: what differs between runs in configuration, environment and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raypipe.commands.run_summary import Summary, summary
from raypipe.commands.show import newest
from raypipe.commands.table_view import cell, view
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.pipeline.tables import CORE
from raypipe.redaction import without_secrets
from raypipe.stats import finite_or_none
from raypipe.storage import tables
from raypipe.storage.run_directory import BASE, RunDirectory
from raypipe.storage.tables import COMMAND_ID, RUN_ID, VARIANT, by_name

#: columns of the environment that differ between any two runs
_OWN = (RUN_ID.name, VARIANT.name, COMMAND_ID.name, "command", "started_at")
#: columns of the blocks in addition to the runs
_HEADINGS = frozenset({"key", "result", "row"})
#: rows that are shown, and those of a table of which no number is declared to be better
_MOST_ROWS, _MOST_UNDECLARED = 60, 100


@dataclass(frozen=True)
class Difference:
    """A key with its value in each run; None where it has none."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Measure:
    """A number of a row in each run, None where there is none.

    ``better`` is lower, higher, or empty if that is not declared.
    """

    table: str
    row: str
    column: str
    better: str
    values: tuple[float | None, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs have different numbers."""
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class Comparison:
    """Differences between runs, and all measures that any of them has."""

    runs: tuple[Summary, ...]
    configuration: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    results: tuple[Measure, ...]

    @property
    def names(self) -> list[str]:
        """A short name of each run: the last part of its path, if these differ."""
        paths = [each.run.shown for each in self.runs]
        last = [path.rstrip("/").rpartition("/")[2] for path in paths]
        is_clear = len(set(last)) == len(last) and not _HEADINGS.intersection(last)
        return last if is_clear else paths


def compare(runs: Sequence[RunDirectory]) -> Comparison:
    """Compare runs.

    Rows of two runs are the same row if the texts agree that tell the rows of a run apart, and the
    whole numbers if texts are not enough. Rows that are still alike count by their mean.

    Raises:
        ConfigError: a run directory cannot be read.

    """
    try:
        found = [summary(run) for run in runs]
        configurations = [_configuration(run) for run in runs]
    except OSError as error:
        raise ConfigError(f"compare: a run directory cannot be read: {error}") from error
    environments = [_environment(each) for each in found]
    return Comparison(
        tuple(found),
        _differences(configurations),
        _differences(environments),
        tuple(_measures(runs)),
    )


def text(found: Comparison, width: int | None) -> str:
    """Return a comparison for a reader."""
    names = found.names
    blocks = [
        "\n".join(f"{n}: {s.run.shown}, {s.status}" for n, s in zip(names, found.runs, strict=True))
    ]
    for title, differences in (
        ("configuration", found.configuration),
        ("environment", found.environment),
    ):
        rows = [
            {"key": each.key, **{n: cell(v) for n, v in zip(names, each.values, strict=True)}}
            for each in differences
        ]
        blocks.append(_block(title, rows, "key", names, width))
    differing = [each for each in found.results if each.differs]
    rows = [
        {
            "result": f"{each.table}.{each.column}",
            "row": each.row,
            **dict(zip(names, _cells(each), strict=True)),
        }
        for each in differing[:_MOST_ROWS]
    ]
    blocks.append(_block("results", rows, "result", names, width))
    notes = []
    if same := len(found.results) - len(differing):
        notes.append(f"{same} results are the same")
    if len(differing) > _MOST_ROWS:
        notes.append(f"{len(differing) - _MOST_ROWS} more differ: see all with --json")
    if not found.results:
        notes.append("no results to compare: no table has numbers that are declared to be better")
    if not (found.configuration or found.environment or differing):
        notes.append("nothing differs")
    return "\n\n".join([*blocks, *notes])


def as_json(found: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values: lists in the order of the runs."""
    return {
        "runs": [{"run_dir": each.run.shown, "status": each.status} for each in found.runs],
        "configuration": {each.key: list(each.values) for each in found.configuration},
        "environment": {each.key: list(each.values) for each in found.environment},
        "results": [{**vars(each), "values": list(each.values)} for each in found.results],
    }


def _block(
    title: str, rows: list[dict[str, str]], first: str, names: list[str], width: int | None
) -> str:
    if not rows:
        return f"{title}: no difference"
    order = (first, *names)
    return f"{title}:\n" + view(
        pa.Table.from_pylist(rows), width, whole=True, first=order, how="everything with --json"
    )


def _cells(measure: Measure) -> list[str]:
    """Return a measure's numbers, each but the first with its difference to the first."""
    first, *others = measure.values
    cells = ["" if first is None else f"{first:.5g}"]
    for value in others:
        if value is None or first is None or value == first:
            cells.append("" if value is None else f"{value:.5g}")
            continue
        verdict = ", better" if (value < first) == (measure.better == "lower") else ", worse"
        cells.append(f"{value:.5g} ({value - first:+.3g}{verdict if measure.better else ''})")
    return cells


def _differences(found: Sequence[Mapping[str, Any]]) -> tuple[Difference, ...]:
    keys = dict.fromkeys(key for each in found for key in each)
    values = {key: tuple(each.get(key) for each in found) for key in keys}
    return tuple(Difference(k, v) for k, v in values.items() if any(one != v[0] for one in v))


def _configuration(run: RunDirectory) -> dict[str, Any]:
    """Return the resolved configuration of the newest command by dotted key."""
    try:
        text = run.read(run.config).decode()
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{run.shown}/config.yaml: is damaged: {error}") from error
    found = load_yaml(text, f"{run.shown}/config.yaml")
    return dict(_flat(without_secrets(found))) if isinstance(found, Mapping) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            is_plain = value is None or isinstance(value, bool | int | float | str)
            flat[f"{prefix}{name}"] = value if is_plain else json.dumps(value, default=str)
    return flat


def _environment(found: Summary) -> dict[str, Any]:
    """Return versions, hardware and code of the newest command, over all of its nodes."""
    rows = newest(tables.read_arrow(found.run, "environment").to_pylist())
    names = [name for row in rows for name in row if name not in _OWN]
    environment = {
        name: ", ".join(sorted({cell(row[name]) for row in rows if row.get(name) is not None}))
        for name in dict.fromkeys(names)
    }
    if found.details is not None:
        environment |= {
            "profile": found.details.profile,
            "experiment's code": found.details.code[:12],
        }
    return environment


def _measures(runs: Sequence[RunDirectory]) -> list[Measure]:
    """Return the measures of all tables: those declared, else the numbers of short tables."""
    core = by_name(CORE)
    names = dict.fromkeys(name for run in runs for name in run.list(run.path("results")))
    names = {name: None for name in names if name not in core or not core[name].partitioned}
    declared: dict[str, dict[str, str]] = {}
    for name in names:
        columns = core[name].columns if name in core else ()
        declared[name] = {column.name: column.better for column in columns if column.better}
        for run in runs:
            declared[name] |= tables.measures(run, name)
    if not any(better for name, better in declared.items() if name not in core):
        declared |= {name: _numbers(runs, name) for name in names if name not in core}
    found: list[Measure] = []
    for name, better in declared.items():
        if better:
            found += _of_table(name, better, [tables.read_arrow(run, name) for run in runs])
    return found


def _numbers(runs: Sequence[RunDirectory], name: str) -> dict[str, str]:
    """Return the real numbers of a short table, apart from times."""
    parts = [tables.read_arrow(run, name) for run in runs]
    if any(len(part) > _MOST_UNDECLARED for part in parts):
        return {}
    numbers = (each for part in parts for each in part.schema if pa.types.is_floating(each.type))
    return {each.name: "" for each in numbers if not each.name.endswith("_s")}


def _of_table(name: str, better: Mapping[str, str], parts: Sequence[pa.Table]) -> list[Measure]:
    rows = [part.to_pylist() for part in parts]
    keys = _keys(parts, rows)
    grouped: list[dict[tuple[str, ...], list[dict[str, Any]]]] = []
    for one in rows:
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in one:
            groups.setdefault(_key(row, keys), []).append(row)
        grouped.append(groups)
    measures: list[Measure] = []
    for key in dict.fromkeys(key for groups in grouped for key in groups):
        label = " ".join(part for part in key if part and part != BASE)
        for column, direction in better.items():
            values = tuple(_mean(groups.get(key, ()), column) for groups in grouped)
            if any(value is not None for value in values):
                measures.append(Measure(name, label, column, direction, values))
    return measures


def _keys(parts: Sequence[pa.Table], rows: Sequence[list[dict[str, Any]]]) -> list[str]:
    """Return the columns that tell the rows of each run apart: texts, then whole numbers."""
    texts: dict[str, None] = {}
    numbers: dict[str, None] = {}
    for part in parts:
        for each in part.schema:
            if pa.types.is_string(each.type) and each.name not in (RUN_ID.name, COMMAND_ID.name):
                texts[each.name] = None
            elif pa.types.is_integer(each.type):
                numbers[each.name] = None
    keys: list[str] = []
    distinct = [min(1, len(one)) for one in rows]
    for name in (*texts, *numbers):
        if all(count == len(one) for count, one in zip(distinct, rows, strict=True)):
            break
        wider = [len({_key(row, [*keys, name]) for row in one}) for one in rows]
        if wider != distinct:
            keys.append(name)
            distinct = wider
    return keys


def _key(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell(row.get(name)) for name in names)


def _mean(rows: Sequence[Mapping[str, Any]], column: str) -> float | None:
    values = [row[column] for row in rows if isinstance(row.get(column), int | float)]
    return finite_or_none(sum(values) / len(values)) if values else None
