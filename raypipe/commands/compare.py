"""``raypipe compare``: what differs between runs in configuration, environment and results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raypipe.commands.compared_measures import Measure, measures
from raypipe.commands.declarations import about
from raypipe.commands.run_summary import Summary, summary
from raypipe.commands.show import newest
from raypipe.commands.table_view import cell, view
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.redaction import without_secrets
from raypipe.store import tables
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import COMMAND_ID, RUN_ID, VARIANT

if TYPE_CHECKING:
    from raypipe.report.best import Headline

#: columns of the environment that differ between any two runs
_OWN = (RUN_ID.name, VARIANT.name, COMMAND_ID.name, "command", "started_at")
#: columns of the blocks in addition to the runs
_HEADINGS = frozenset({"key", "result", "row"})
#: rows that are shown
_MOST_ROWS = 60


@dataclass(frozen=True)
class Comparison:
    """Differences between runs, and all measures that any of them has.

    ``configuration`` and ``environment`` have the value of a key in each run, None where it has
    none.
    """

    runs: tuple[Summary, ...]
    configuration: Mapping[str, tuple[Any, ...]]
    environment: Mapping[str, tuple[Any, ...]]
    results: tuple[Measure, ...]
    bests: tuple[Sequence[Headline], ...]

    @property
    def best(self) -> dict[str, tuple[Headline | None, ...]]:
        """The best points of each run by each number that several points have."""
        known = [{each.label_of_metric: each for each in bests} for bests in self.bests]
        names = dict.fromkeys(name for own in known for name, each in own.items() if each.leaders)
        return {name: tuple(own.get(name) for own in known) for name in names}

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
    whole numbers if texts are not enough. Rows that are still alike count by their mean. Of a table
    with axes and a seed, such as the calls of a function, rows with the same axes are one row.

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
        tuple(measures(runs)),
        tuple(about(run).bests for run in runs),
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
            {"key": key, **{n: cell(v) for n, v in zip(names, values, strict=True)}}
            for key, values in differences.items()
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
    if best := found.best:
        lines = [line for name, of in best.items() for line in _best(name, names, of, width)]
        blocks.append("\n".join(["best setting of each run:", *lines]))
    notes = _averaged(found)
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
        "configuration": {key: list(each) for key, each in found.configuration.items()},
        "environment": {key: list(each) for key, each in found.environment.items()},
        "results": [_plain(each) for each in found.results],
        "best": {
            name: [None if each is None else each.leaders for each in best]
            for name, best in found.best.items()
        },
    }


def _plain(measure: Measure) -> dict[str, Any]:
    return {**vars(measure), "values": list(measure.values), "counts": list(measure.counts)}


def _best(
    name: str, names: Sequence[str], best: Sequence[Headline | None], width: int | None
) -> Iterator[str]:
    """Yield the best number of each run with its setting, on lines that are never cut."""
    yield name
    for run, each in zip(names, best, strict=True):
        text = "none" if each is None else f"{each.mean:.5g} ({each.text})"
        yield from wrap(
            f"  {run}: {text}",
            width or sys.maxsize,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _averaged(found: Comparison) -> list[str]:
    """Return a note per table that is averaged over seeds: the number of seeds in each run."""
    counts: dict[str, list[tuple[int, ...]]] = {}
    for each in found.results:
        if each.counts:
            counts.setdefault(each.table, []).append(each.counts)
    notes = []
    for table, of_rows in counts.items():
        texts = []
        for name, column in zip(found.names, zip(*of_rows, strict=True), strict=True):
            known = [count for count in column if count]
            least, most = min(known, default=0), max(known, default=0)
            texts.append(f"{least if least == most else f'{least} to {most}'} in {name}")
        notes.append(f"{table}: means over seeds: {', '.join(texts)}")
    return notes


def _block(
    title: str, rows: list[dict[str, str]], first: str, names: list[str], width: int | None
) -> str:
    if not rows:
        return f"{title}: no difference"
    order = (first, *names)
    return f"{title}:\n" + view(
        pa.Table.from_pylist(rows),
        width,
        whole=True,
        first=order,
        by_words=names if first == "result" else (),
        how="everything with --json",
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
