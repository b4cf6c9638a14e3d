"""``raypipe compare``: what differs between runs in configuration, environment and results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from raypipe.commands.summary import Summary, summary
from raypipe.commands.table_view import cell, view
from raypipe.config.yaml_text import load_yaml
from raypipe.graph.tracking import flat
from raypipe.report.results import RunResults, training_measures
from raypipe.report.tables import Results, means, plain, point_label
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import ADDED, Table

#: columns of the environment that differ between any two runs
_OWN = (*ADDED, "command", "started_at")
#: rows that are shown, and rows of a table of which no number is declared to be better
_MOST_ROWS, _MOST_UNDECLARED = 60, 100
#: the column with the place of the run, while rows of several runs are one table
_RUN = "\0run"


def compare(runs: Sequence[RunDirectory]) -> dict[str, Any]:
    """Return the differences between runs by section, and all measures that any of them has.

    ``configuration`` and ``environment`` have the value of a key in each run, None where it has
    none; ``results`` a number of a row in each run; ``best`` the best points of each run and their
    result in words, by each number that several points have.

    Rows of two runs are the same row if they are the same point: the axes of their table agree.
    Repetitions of a point, such as calls with other seeds, count by their mean.

    Raises:
        ConfigError: a run directory cannot be read.

    """
    summaries = [*map(summary, runs)]
    bests = [
        {
            each.label_of_metric: {"points": each.leaders, "text": f"{each.mean:.5g} ({each.text})"}
            for each in found.results.bests
        }
        for found in summaries
    ]
    metrics = dict.fromkeys(name for own in bests for name, each in own.items() if each["points"])
    return {
        "runs": [{"run_dir": each.run.shown, "status": each.status} for each in summaries],
        "configuration": _differences([*map(_configuration, summaries)]),
        "environment": _differences([*map(_environment, summaries)]),
        "results": list(_measures([each.results for each in summaries])),
        "best": {name: [own.get(name) for own in bests] for name in metrics},
    }


def tables(found: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each section of a comparison, as a reader sees them."""
    names = [f"run {number}" for number in range(1, len(found["runs"]) + 1)]
    titled: dict[str, list[tuple[dict[str, str], Iterable[str]]]] = {
        title: [({"key": key}, map(cell, values)) for key, values in found[title].items()]
        for title in ("configuration", "environment")
    }
    titled["results"] = [
        ({"result": f"{each['table']}.{each['column']}", "row": each["row"]}, _cells(each))
        for each in _differing(found)[:_MOST_ROWS]
    ]
    if found["best"]:
        titled["best setting of each run"] = [
            ({"metric": name}, [each["text"] if each else "none" for each in of_runs])
            for name, of_runs in found["best"].items()
        ]
    return {
        title: [{**row, **dict(zip(names, cells, strict=True))} for row, cells in rows]
        for title, rows in titled.items()
    }


def text(found: Mapping[str, Any], width: int | None) -> str:
    """Return a comparison for a reader, as wide as the terminal."""
    differing, named = _differing(found), enumerate(found["runs"], 1)
    places = (f"run {number}: {run['run_dir']}, {run['status']}" for number, run in named)
    blocks = ["\n".join(places)]
    for title, lines in tables(found).items():
        kept = [name for name in lines[0] if name != "row"] if lines else []
        how = "everything with --json"
        shown = view(lines, width, whole=True, first=kept, kept=len(kept), how=how)
        blocks.append(f"{title}:\n{shown}" if lines else f"{title}: no difference")
    if same := len(found["results"]) - len(differing):
        blocks.append(f"{same} results are the same")
    if len(differing) > _MOST_ROWS:
        blocks.append(f"{len(differing) - _MOST_ROWS} more differ: see all with --json")
    if not found["results"]:
        blocks.append("no results to compare: no table has numbers that are declared to be better")
    if not (found["configuration"] or found["environment"] or differing):
        blocks.append("nothing differs")
    return "\n\n".join(blocks)


def _differing(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in found["results"] if len({*each["values"]}) > 1]


def _cells(measure: Mapping[str, Any]) -> list[str]:
    """Return the numbers of a row, each but the first with its difference to the first."""
    better, (first, *others) = measure["better"], measure["values"]
    cells = ["" if value is None else f"{value:.5g}" for value in measure["values"]]
    for place, value in enumerate(others, 1):
        if value is not None and first is not None and value != first:
            verdict = ", better" if (value < first) == (better == "lower") else ", worse"
            cells[place] += f" ({value - first:+.3g}{verdict if better else ''})"
    return cells


def _differences(values: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[Any]]:
    keys = dict.fromkeys(key for of_run in values for key in of_run)
    every = {key: [of_run.get(key) for of_run in values] for key in keys}
    return {key: own for key, own in every.items() if any(each != own[0] for each in own)}


def _configuration(found: Summary) -> dict[str, Any]:
    """Return the resolved configuration of the newest command by dotted key."""
    values = load_yaml(found.results.configuration, f"{found.run.shown}/config.yaml")
    return flat(values) if isinstance(values, Mapping) else {}


def _environment(found: Summary) -> dict[str, Any]:
    """Return versions, hardware and code of the newest command, over all of its nodes."""
    names = dict.fromkeys(name for row in found.environment for name in row if name not in _OWN)
    environment = {
        name: ", ".join(
            sorted({cell(row[name]) for row in found.environment if row.get(name) is not None})
        )
        for name in names
    }
    known = found.details
    return environment | {"profile": known.profile, "experiment's code": known.code[:12]}


def _measures(runs: Sequence[RunResults]) -> Iterator[dict[str, Any]]:
    """Yield the measures of all tables: those declared, else the real numbers of short tables."""
    named = [{each.table.name: each for each in (*run.results, *_trainings(run))} for run in runs]
    is_declared = any(
        column.better for run in runs for each in run.results for column in each.shape.numbers
    )
    for name in dict.fromkeys(name for tables in named for name in tables):
        known = {place: tables[name] for place, tables in enumerate(named) if name in tables}
        parts = [each.rows.assign(**{_RUN: place}) for place, each in known.items()]
        rows, table, *_ = pd.concat(parts, ignore_index=True), *known.values()
        axes = dict.fromkeys(axis for each in known.values() for axis in each.table.axes)
        shape = Results(replace(table.table, axes=tuple(axes)), rows.drop(columns=_RUN)).shape
        by = (*shape.groups, *shape.axes)
        columns = [column for column in shape.numbers if column.better]
        if not is_declared and len(rows[list(by)].drop_duplicates()) <= _MOST_UNDECLARED:
            reals = [c for c in shape.numbers if pd.api.types.is_float_dtype(rows[c.name])]
            columns = [column for column in reals if not column.name.endswith("_s")]
        for column in columns:
            points: dict[str, list[float | None]] = {}
            for place in known:
                own = rows[rows[_RUN] == place].sort_values(list(shape.seeds), kind="stable")
                found = means(own, by, column.name, shape.seeds)  # whatever the order of the rows
                for at in range(len(found.mean)):
                    label = point_label(dict(found.points.iloc[at]))
                    values = points.setdefault(label, [None] * len(runs))
                    values[place] = float(found.mean.iloc[at])
            for label, means_of in points.items():
                named_by = {"table": name, "row": label, "column": column.name}
                yield {**named_by, "better": column.better, "values": means_of}


def _trainings(run: RunResults) -> Iterator[Results]:
    """Yield the trainings with all of their measures; without any, nothing."""
    trials = run.tables.get("trials", pd.DataFrame())
    known = [str(column) for column in trials if trials[column].notna().any()]
    measures = training_measures(known, run.core("trials").columns, run.monitors)
    if measures and "trial_id" in known:
        names = ["trial_id", *(column.name for column in measures)]
        table = Table("trials", "", tuple(measures), axes=("trial_id",))
        yield Results(table, plain(trials[names]))
