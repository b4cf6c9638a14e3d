"""Summary of a run directory: ``raypipe ls`` has a line of it, ``raypipe show`` about ten.

What became of the newest command is read from its status, without the ledger.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pyarrow import fs as arrow_fs

from raypipe.commands.declarations import results_of
from raypipe.commands.logs import has_recovered
from raypipe.commands.results import newest_environment
from raypipe.commands.table_view import cell, terminal_width, view, wrapped
from raypipe.errors import ConfigError
from raypipe.graph.progress import rough
from raypipe.graph.unit_logs import first_line
from raypipe.hardware import bytes_text
from raypipe.redaction import printable
from raypipe.store import run_status, tables
from raypipe.store.ledger import REPLACED, Ledger
from raypipe.store.lock import is_held
from raypipe.store.run_directory import BASE, RunDirectory, is_run, variant_name
from raypipe.store.run_status import RunStatus

KILLED = "its process ended without a word: it or Ray's raylet was killed, or the machine is gone"
#: folders below the given one in which runs are looked for, one inside the other
_DEPTH = 4
#: listings and readings at the same time, which an object store answers slowly one by one
_THREADS = 16
#: results, points of each, failures and stages that ``show`` names
_MOST_MEASURES, _MOST_POINTS, _MOST_FAILURES, _MOST_STAGES = 4, 3, 3, 8
#: lines to copy from, which stay on one line
_COPIED = ("run", "command", "continue", "follow", "report")
_VERSIONS = ("raypipe", "torch", "ray")


#: the status of a run without one, or with a damaged one
_NEVER = "1970-01-01T00:00:00+00:00"
_UNKNOWN = RunStatus("", "", "", "unknown", _NEVER, _NEVER, _NEVER)


@dataclass(frozen=True)
class Summary:
    """Outcome of a run: its newest command's status, written ``since_s`` seconds ago if it runs.

    The status is running, succeeded, failed, interrupted, or unknown without details.
    """

    run: RunDirectory
    details: RunStatus
    since_s: float = 0.0

    @property
    def status(self) -> str:
        """The status in a word."""
        return self.details.status

    @property
    def duration_s(self) -> float | None:
        """The seconds of all commands; None if unknown."""
        return self.details.duration_s + self.since_s if self.ago else None

    @property
    def result(self) -> str:
        """The result that stands for the run, in words."""
        return self.details.key_result.text if self.details.key_result is not None else ""

    @property
    def progress(self) -> str:
        """How far the stages are that run, or ran when the command was killed: ``fit 26/45``."""
        rows = self.details.running
        return ", ".join(f"{r['stage']} {r['done']}/{r['total']}" for r in rows if r["total"])

    @property
    def ago(self) -> str:
        """How long ago the newest command started: ``3 min ago``; empty if unknown."""
        started_at = self.details.started_at
        return "" if started_at == _NEVER else f"{rough(_since(started_at))} ago"


def _since(time: str) -> float:
    """Return the seconds since a time."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())


def summary(run: RunDirectory) -> Summary:
    """Return the summary of a run directory.

    Raises:
        OSError: it cannot be read.

    """
    known = run_status.read(run)
    if known is None:  # damaged, or the first command has not written it yet
        return Summary(run, replace(_UNKNOWN, status="running") if is_held(run) else _UNKNOWN)
    if known.status == "running" and is_held(run):
        return Summary(run, known, _since(known.updated_at))
    if known.status == "running":
        known = run_status.read(run) or known  # it may have ended since the status was read
    if known.status == "running":
        with suppress(ConfigError):  # what it had computed is in the tables
            known = replace(known, key_result=results_of(run).key_result)
        known = replace(known, status="interrupted", message=KILLED)
    return Summary(run, known)


def runs(location: str) -> list[Summary]:
    """Return the runs in a folder and those below, the newest first.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.

    """
    root = RunDirectory.at(location)
    try:
        if not root.exists(root.path()) and not root.list(root.path()):
            raise ConfigError(f"{root.shown}: does not exist; `raypipe ls DIR` looks in DIR")
        if root.is_file:
            raise ConfigError(f"{root.shown}: is a file; `raypipe ls DIR` looks in a folder")
        with ThreadPoolExecutor(_THREADS) as threads:
            found = [each for each in threads.map(_summary, _below(root, threads)) if each]
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{root.shown}: cannot be read: {error}") from error
    return sorted(found, key=lambda each: _since(each.details.started_at))


def listing(found: Sequence[Summary], location: str, width: int | None) -> str:
    """Return runs as a table; paths begin as the location does."""
    base = RunDirectory.at(location)
    if not found:
        return f"no runs in {base.shown}"
    rows = []
    for each in found:
        path = each.run.shown
        if base.is_local and path.startswith(base.path()):
            rest = path.removeprefix(base.path()).lstrip("/")
            path = "/".join(filter(None, (location.rstrip("/"), rest)))
        counted = f"{each.details.ended}/{each.details.stages}" if each.details.stages else ""
        progress = f"({each.progress})" if each.progress else ""
        row = {
            "run": path,
            "experiment": each.details.experiment,
            "status": each.status,
            "started": each.ago,
            "took": "" if each.duration_s is None else rough(each.duration_s),
            "stages": " ".join(filter(None, (counted, progress))),
            "result": each.result,
        }
        rows.append(row)
    if all(row["experiment"] in row["run"].split("/") for row in rows):
        for row in rows:
            del row["experiment"]
    first = ("run", "result", "status", "stages", "started")
    return view(rows, width, whole=True, first=first, kept=3, how="them with --json")


def show_text(run: RunDirectory) -> str:
    """Return the lines on a run.

    Raises:
        ConfigError: the run directory cannot be read.

    """
    try:
        lines = [(name, printable(text)) for name, text in _lines(run, summary(run))]
    except OSError as error:
        raise ConfigError(f"{run.shown}: cannot be read: {error}") from error
    widest, width = max(len(name) for name, _ in lines), terminal_width()
    shown = []
    for name, text in lines:
        if width is not None and name not in _COPIED:
            hanging = f"\n{' ' * (widest + 2)}"
            text = wrapped(text, max(20, width - widest - 2)).replace("\n", hanging)
        shown.append(f"{name:{widest}}  {text}")
    return "\n".join(shown)


def _below(root: RunDirectory, threads: ThreadPoolExecutor) -> list[RunDirectory]:
    """Return the run directories in a folder and those below; nothing inside of them counts."""
    found: list[RunDirectory] = []
    level = [root]
    for _ in range(_DEPTH + 1):
        below: list[RunDirectory] = []
        for folder, (is_found, names) in zip(level, threads.map(_listed, level), strict=True):
            if is_found:
                found.append(folder)
            else:
                below += [folder.inside(name) for name in names]
        level = below
    return found


def _listed(folder: RunDirectory) -> tuple[bool, list[str]]:
    """Return whether a folder is a run directory, and the names of its folders."""
    try:
        infos = folder.infos(folder.path())
    except OSError:  # another user's
        return False, []
    folders = [i.base_name for i in infos if i.type == arrow_fs.FileType.Directory]
    usable = (n for n in folders if not n.startswith(".") and n.isprintable())
    return is_run({info.base_name for info in infos}), sorted(usable)


def _summary(run: RunDirectory) -> Summary | None:
    with suppress(OSError):  # removed meanwhile, or another user's
        return summary(run)
    return None


def _lines(run: RunDirectory, found: Summary) -> Iterator[tuple[str, str]]:
    ledger, known = Ledger(run, writable=False), found.details
    environment = newest_environment(run)
    command = known.command
    yield "run", run.shown
    stages = f"{known.ended} of {known.stages} stages" if known.stages else ""
    message = cell(first_line(known.message))
    yield "status", ", ".join(filter(None, (found.status, stages, found.progress, message)))
    profile = f", profile {known.profile}" if known.profile else ""
    yield "experiment", f"{known.experiment}{profile}"
    if environment:
        command = command or cell(environment[0].get("command"))
        yield "command", cell(environment[0].get("command"))
        yield "code", _code(environment[0])
        yield "hardware", "; ".join(dict.fromkeys(map(_node, environment)))
    yield "time", _time(found)
    replaced = [name for name in run.list(run.ledger) if name.endswith(REPLACED)]
    if ledger.damage:
        yield "ledger", f"damaged: {ledger.damage}"
    elif replaced:
        yield "ledger", f"was damaged and repaired; ledger/{replaced[-1]} has the damaged lines"
    if rows := tables.read_arrow(run, "stages").to_pylist():
        yield "stages", _stages(rows)
    yield from (("result", text) for text in results(run))
    failed = ledger.rows("failures")
    failures = [row for row in failed if not has_recovered(ledger, row)]
    for row in failures[-_MOST_FAILURES:]:
        last = str(row.get("message") or "").strip().rpartition("\n")[2]
        then = f" ({row['outcome']})" if row.get("outcome") else ""
        yield "failure", cell(f"{row.get('unit')}: {row.get('kind')}{then}: {last}")
    if len(failures) > _MOST_FAILURES:
        all_of_them = shlex.join(["raypipe", "results", run.shown, "failures"])
        yield "", f"all {len(failures)}: {all_of_them}"
    if later := len(failed) - len(failures):
        logs = shlex.join(["raypipe", "logs", run.shown])
        attempts = "attempt" if later == 1 else "attempts"
        yield "recovered", f"{later} failed {attempts} of units that succeeded later: {logs}"
    if found.status == "running":
        yield "follow", shlex.join(["raypipe", "watch", run.shown])
    elif found.status != "succeeded" and command:
        yield "continue", command
    page = f"{run.report}/index.html"
    if run.exists(page):
        yield "report", page if run.is_local else f"{run.shown}/report/index.html"


def results(run: RunDirectory) -> Iterator[str]:
    """Yield a line for each of the best results with the next ones, and for what is not finite."""
    found = results_of(run)
    for best in found.bests[:_MOST_MEASURES]:
        after = best.ranking[best.ties :][: max(0, _MOST_POINTS - best.ties)]
        parts = [_value(best.mean, best.text)]
        for each in after:
            repeated = f"mean of {each.runs}" if each.runs > 1 else ""
            parts.append(_value(each.mean, ", ".join(filter(None, (each.label, repeated)))))
        more = len(best.points) - best.ties - len(after)
        parts += [f"and {more} more"] * (more > 0)
        yield f"{best.metric} ({best.column.better} is better): {', '.join(parts)}"
    yield from found.not_finite


def _value(mean: float, text: str) -> str:
    return f"{mean:.4g}" + (f" ({text})" if text else "")


def _code(row: Mapping[str, Any]) -> str:
    commit = str(row.get("git_commit") or "")[:12]
    text = f"commit {commit}" if commit else "no commit"
    if row.get("git_dirty"):
        text += " with changed files"
    return ", ".join([text, *(f"{n} {row[n]}" for n in _VERSIONS if row.get(n))])


def _node(row: Mapping[str, Any]) -> str:
    gpus = f"{row.get('gpu_count')} x {row['gpus']}" if row.get("gpus") else "no GPU"
    memory = bytes_text(row["memory_bytes"]) if row.get("memory_bytes") else "unknown memory"
    return f"{row.get('hostname')}: {row.get('cpus')} CPUs, {memory}, {gpus}"


def _time(found: Summary) -> str:
    if found.duration_s is None:
        return "unknown"
    started_at = datetime.fromisoformat(found.details.started_at)
    at = started_at.astimezone().strftime("%Y-%m-%d %H:%M")
    many = found.details.commands
    of = f" in {many} commands" if many > 1 else ""
    verb = "runs" if found.status == "running" else "took"
    return f"started {at} ({found.ago}), {verb} {rough(found.duration_s)}{of}"


def _stages(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the stages: those that did not succeed, then the longest."""
    ranked = sorted(
        rows, key=lambda row: (row.get("status") == "succeeded", -(row.get("duration_s") or 0.0))
    )
    parts = []
    for row in ranked[:_MOST_STAGES]:
        name = variant_name(cell(row.get("stage")), str(row.get("variant") or BASE))
        status = "" if row.get("status") == "succeeded" else f"{row.get('status')} "
        parts.append(f"{name} {status}{rough(row.get('duration_s') or 0.0)}")
    rest = Counter(str(row.get("status")) for row in ranked[_MOST_STAGES:])
    parts += [f"and {count} more {status}" for status, count in rest.items()]
    return ", ".join(parts)
