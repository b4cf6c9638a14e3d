"""``raypipe show``: what happened in a run, in about ten lines."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from raypipe.commands.compared_measures import is_averaged
from raypipe.commands.logs import has_recovered
from raypipe.commands.ls import ago
from raypipe.commands.run_summary import Summary, summary
from raypipe.commands.table_view import cell, shorten
from raypipe.config.matrix import is_seed
from raypipe.errors import ConfigError
from raypipe.hardware import bytes_text
from raypipe.pipeline.progress import rough
from raypipe.pipeline.unit_logs import first_line
from raypipe.redaction import printable
from raypipe.storage import tables
from raypipe.storage.ledger import REPLACED, Ledger
from raypipe.storage.run_directory import BASE, RunDirectory

#: results of a table, rows of each, failures and stages that are named
_MOST_MEASURES, _MOST_ROWS, _MOST_FAILURES, _MOST_STAGES = 4, 3, 3, 8
#: lines to copy from, which are never shortened
_WHOLE = ("run", "command", "ledger", "recovered", "continue", "follow", "report")
_VERSIONS = ("raypipe", "torch", "ray")


def show(run: RunDirectory, width: int | None) -> str:
    """Return the lines on a run.

    Raises:
        ConfigError: the run directory cannot be read.

    """
    try:
        found = summary(run)
    except OSError as error:
        raise ConfigError(f"{run.shown}: cannot be read: {error}") from error
    lines = [(name, printable(text)) for name, text in _lines(run, found)]
    widest = max(len(name) for name, _ in lines)
    room = None if width is None else max(20, width - widest - 2)
    return "\n".join(
        f"{name:{widest}}  {text if room is None or name in _WHOLE else shorten(text, room)}"
        for name, text in lines
    )


def _lines(run: RunDirectory, found: Summary) -> Iterator[tuple[str, str]]:
    ledger = Ledger(run, writable=False)
    environment = newest(_rows(run, "environment"))
    yield "run", run.shown
    yield "status", _status(found)
    profile = found.details.profile if found.details is not None else ""
    yield "experiment", found.experiment + (f", profile {profile}" if profile else "")
    if environment:
        yield "command", cell(environment[0].get("command"))
        yield "code", _code(environment[0])
        yield "hardware", "; ".join(dict.fromkeys(map(_node, environment)))
    yield "time", _time(found)
    replaced = [name for name in run.list(run.ledger) if name.endswith(REPLACED)]
    if ledger.damage:
        yield "ledger", f"damaged: {ledger.damage}"
    elif replaced:
        yield "ledger", f"was damaged and repaired; ledger/{replaced[-1]} has the damaged lines"
    stages = _rows(run, "stages")
    if stages:
        yield "stages", _stages(stages)
    yield from (("result", text) for text in results(run, found))
    failed = ledger.rows("failures")
    failures = [row for row in failed if not has_recovered(ledger, row)]
    for row in failures[-_MOST_FAILURES:]:
        yield "failure", _failure(row)
    if len(failures) > _MOST_FAILURES:
        yield (
            "",
            f"all {len(failures)}: {shlex.join(['raypipe', 'results', run.shown, 'failures'])}",
        )
    if later := len(failed) - len(failures):
        logs = shlex.join(["raypipe", "logs", run.shown])
        attempts = "attempt" if later == 1 else "attempts"
        yield "recovered", f"{later} failed {attempts} of units that succeeded later: {logs}"
    command = found.details.command if found.details is not None else ""
    if not command and environment:
        command = cell(environment[0].get("command"))
    if found.status not in ("succeeded", "running") and command:
        yield "continue", command
    elif found.status == "running":
        yield "follow", shlex.join(["raypipe", "watch", run.shown])
    page = f"{run.report}/index.html"
    if run.exists(page):
        yield "report", page if run.is_local else f"{run.shown}/report/index.html"


def results(run: RunDirectory, found: Summary) -> Iterator[str]:
    """Yield a line for each measure of the table of the key result, the best row first."""
    key = found.details.key_result if found.details is not None else None
    if key is None or key.table not in run.list(run.path("results")):
        return
    rows = tables.read_arrow(run, key.table)
    measures = {key.column: key.better, **tables.better(rows.schema)}
    points = _without_seeds(run)
    shown = 0
    for name in sorted(measures, key=lambda each: each != key.column):
        if name not in rows.column_names or shown == _MOST_MEASURES:
            continue
        if text := _measure(rows, name, measures[name], points):
            shown += 1
            yield f"{key.table}.{name} ({measures[name]} is better): {text}"


def _measure(rows: pa.Table, name: str, better: str, points: Mapping[str, str]) -> str:
    """Return the best values of a measure; ``points`` are those of :func:`_without_seeds`."""
    known = [row for row in rows.to_pylist() if isinstance(row[name], int | float)]
    known = [row for row in known if row[name] == row[name]]  # not NaN
    known = [{**row, "variant": points.get(row.get("variant"), row.get("variant"))}
             for row in known]  # fmt: skip
    averaged = is_averaged(rows)
    values: dict[Any, list[float]] = {}
    for place, (row, label) in enumerate(zip(known, _labels(rows, known, points), strict=True)):
        repeated = averaged or row["variant"] in points.values()
        values.setdefault((label, None if repeated else place), []).append(float(row[name]))
    means = [(sum(of) / len(of), label, len(of)) for (label, _), of in values.items()]
    means.sort(key=lambda each: each[0], reverse=better == "higher")
    parts = []
    for mean, label, count in means[:_MOST_ROWS]:
        about = ", ".join(filter(None, (label, f"mean of {count}" if count > 1 else "")))
        parts.append(f"{mean:.4g} ({about})" if about else f"{mean:.4g}")
    more = f", and {len(means) - _MOST_ROWS} more" if len(means) > _MOST_ROWS else ""
    return ", ".join(parts) + more


def _labels(
    table: pa.Table, rows: Sequence[Mapping[str, Any]], points: Mapping[str, str]
) -> list[str]:
    """Return what tells each row from the others: its axes or texts that differ among the rows."""
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    own = tables.axes(table.schema)
    if own:  # without the text that names a call
        texts = [name for name in texts if name in ("variant", *own)]
    names = [
        name
        for name in dict.fromkeys([*own, *texts])
        if name not in ("run_id", "command_id", "worker", *(["trial_id"] if points else []))
        and len({row[name] for row in rows}) > 1
    ]
    return [
        ", ".join(
            cell(row[name]) if name in texts else f"{name}={cell(row[name])}"
            for name in names
            if row[name] not in (None, BASE)
        )
        for row in rows
    ]


def _without_seeds(run: RunDirectory) -> dict[str, str]:
    """Return the variants that depend on a seed, each with the name of its point without seeds."""
    found: dict[str, dict[str, str]] = {}
    seeded = set()
    for row in _rows(run, "variants"):
        values = found.setdefault(row["variant"], {})
        if is_seed(row["key"]):
            seeded.add(row["variant"])
        else:
            values[row["key"]] = row["value"]
    return {v: ", ".join(f"{key}={text}" for key, text in found[v].items()) for v in seeded}


def _status(found: Summary) -> str:
    counted = f"{found.ended} of {found.stages} stages" if found.stages else ""
    parts = [found.status, counted, found.progress, cell(first_line(found.message))]
    return ", ".join(filter(None, parts))


def _code(row: Mapping[str, Any]) -> str:
    commit = str(row.get("git_commit") or "")[:12]
    parts = [f"commit {commit}" if commit else "no commit"]
    if row.get("git_dirty"):
        parts[0] += " with changed files"
    return ", ".join([*parts, *(f"{n} {row[n]}" for n in _VERSIONS if row.get(n))])


def _node(row: Mapping[str, Any]) -> str:
    gpus = f"{row.get('gpu_count')} x {row['gpus']}" if row.get("gpus") else "no GPU"
    memory = bytes_text(row["memory_bytes"]) if row.get("memory_bytes") else "unknown memory"
    return f"{row.get('hostname')}: {row.get('cpus')} CPUs, {memory}, {gpus}"


def _time(found: Summary) -> str:
    parts = []
    if found.started_at is not None:
        at = found.started_at.astimezone().strftime("%Y-%m-%d %H:%M")
        parts.append(f"started {at} ({ago(found.started_at)})")
    if found.duration_s is not None:
        many = found.details.commands if found.details is not None else 1
        of = f" in {many} commands" if many > 1 else ""
        parts.append(
            f"{'runs' if found.status == 'running' else 'took'} {rough(found.duration_s)}{of}"
        )
    return ", ".join(parts) or "unknown"


def _stages(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the stages: those that did not succeed, then the longest."""
    ranked = sorted(
        rows, key=lambda row: (row.get("status") == "succeeded", -(row.get("duration_s") or 0.0))
    )
    parts = []
    for row in ranked[:_MOST_STAGES]:
        name = cell(row.get("stage"))
        if row.get("variant") not in (None, BASE):
            name += f"@{cell(row['variant'])}"
        status = "" if row.get("status") == "succeeded" else f"{row.get('status')} "
        parts.append(f"{name} {status}{rough(row.get('duration_s') or 0.0)}")
    rest = Counter(str(row.get("status")) for row in ranked[_MOST_STAGES:])
    parts += [f"and {count} more {status}" for status, count in rest.items()]
    return ", ".join(parts)


def _failure(row: Mapping[str, Any]) -> str:
    last = str(row.get("message") or "").strip().rpartition("\n")[2]
    then = f" ({row['outcome']})" if row.get("outcome") else ""
    return cell(f"{row.get('unit')}: {row.get('kind')}{then}: {last}")


def newest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the newest command, one per node."""
    if not rows:
        return []
    newest = max(rows, key=lambda row: str(row.get("started_at")))
    return [row for row in rows if row.get("command_id") == newest.get("command_id")]


def _rows(run: RunDirectory, table: str) -> list[dict[str, Any]]:
    return list(tables.read_arrow(run, table).to_pylist())
