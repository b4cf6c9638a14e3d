"""``raypipe show``: what happened in a run, in about ten lines."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from raypipe.commands.declarations import about
from raypipe.commands.logs import has_recovered
from raypipe.commands.ls import ago
from raypipe.commands.run_summary import Summary, summary
from raypipe.commands.table_view import cell, shorten
from raypipe.errors import ConfigError
from raypipe.graph.progress import rough
from raypipe.graph.unit_logs import first_line
from raypipe.hardware import bytes_text
from raypipe.redaction import printable
from raypipe.store import tables
from raypipe.store.ledger import REPLACED, Ledger
from raypipe.store.run_directory import BASE, RunDirectory

#: results, points of each, failures and stages that are named
_MOST_MEASURES, _MOST_POINTS, _MOST_FAILURES, _MOST_STAGES = 4, 3, 3, 8
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
    shown = []
    for name, text in lines:
        parts = [text]
        if name == "result" and room is not None:  # never cut inside a value
            parts = wrap(text, room - 2, break_long_words=False, break_on_hyphens=False)
        elif name not in _WHOLE and room is not None:
            parts = [shorten(text, room)]
        shown += [f"{name:{widest}}  {parts[0]}", *(" " * (widest + 4) + p for p in parts[1:])]
    return "\n".join(shown)


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
    yield from (("result", text) for text in results(run))
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


def results(run: RunDirectory) -> Iterator[str]:
    """Yield a line for each of the best results with the next ones, and for what is not finite."""
    found = about(run)
    for best in found.bests[:_MOST_MEASURES]:
        after = best.ranking[best.ties :][: max(0, _MOST_POINTS - best.ties)]
        parts = [_value(best.mean, best.text)]
        for each in after:
            runs = f"mean of {each.runs}" if each.runs > 1 else ""
            parts.append(_value(each.mean, ", ".join(filter(None, (each.label, runs)))))
        more = len(best.points) - best.ties - len(after)
        parts += [f"and {more} more"] * (more > 0)
        yield f"{best.metric} ({best.column.better} is better): {', '.join(parts)}"
    yield from found.not_finite


def _value(mean: float, text: str) -> str:
    return f"{mean:.4g}" + (f" ({text})" if text else "")


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
    newest = max(rows, key=lambda row: str(row["started_at"]))
    return [row for row in rows if row["command_id"] == newest["command_id"]]


def _rows(run: RunDirectory, table: str) -> list[dict[str, Any]]:
    return list(tables.read_arrow(run, table).to_pylist())
