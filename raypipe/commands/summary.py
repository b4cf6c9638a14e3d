"""Summary of a run directory, and its views: ``raypipe show``, ``watch`` and ``logs``.

What became of the newest command is read from its status, without the ledger.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from raypipe.commands.results import opened, results_of
from raypipe.commands.table_view import cell, terminal_width, view, wrapped
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.graph.progress import clock_text, rough
from raypipe.graph.unit_logs import first_line
from raypipe.hardware import bytes_text
from raypipe.redaction import last_state, printable, without_credentials
from raypipe.store import run_notes, run_status, tables
from raypipe.store.ledger import REPLACED, Ledger, Row
from raypipe.store.lock import is_held
from raypipe.store.run_directory import BASE, RunDirectory, variant_name
from raypipe.store.run_notes import RunNotes
from raypipe.store.run_status import RunStatus

if TYPE_CHECKING:
    from raypipe.report.results import RunResults

KILLED = "its process ended without a word: it or Ray's raylet was killed, or the machine is gone"
#: results, points of each, failures and stages that ``show`` names
_MOST_MEASURES, _MOST_POINTS, _MOST_FAILURES, _MOST_STAGES = 4, 3, 3, 8
#: lines to copy from, which stay on one line
_COPIED = ("run", "command", "continue", "follow", "report")
_VERSIONS = ("raypipe", "torch", "ray")

#: seconds between looks at a run that is followed: at a disk, and at an object store
_PERIOD_S, _REMOTE_PERIOD_S = 1.0, 5.0
#: seconds between plain lines of its progress
_PLAIN_PERIOD_S = 10.0

_LOG = ".log"
#: what is said of a run without logs
_NO_LOGS = (
    "has no logs: no unit printed anything or failed. What a unit prints goes to logs/ in the run "
    "directory; with --local, to the terminal"
)

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
    notes: RunNotes = field(default_factory=RunNotes)

    @property
    def status(self) -> str:
        """The status in a word."""
        return self.details.status

    @property
    def duration_s(self) -> float | None:
        """The seconds of all commands; None if unknown."""
        return self.details.duration_s + self.since_s if self.ago else None

    @property
    def progress(self) -> str:
        """How far the stages are that run, or ran when the command was killed: ``fit 26/45``."""
        rows = (row for row in self.details.running if row.get("total"))
        counts = (f"{r.get('stage')} {r.get('done')}/{r['total']}" for r in rows)
        return ", ".join(filter(None, (*counts, self.jobs)))

    @property
    def jobs(self) -> str:
        """The number of living commands that share the run: ``4 jobs``; empty for one."""
        several = self.status == "running" and self.details.jobs > 1
        return f"{self.details.jobs} jobs" if several else ""

    @property
    def ago(self) -> str:
        """How long ago the newest command started: ``3 min ago``; empty if unknown."""
        started_at = self.details.started_at
        return "" if started_at == _NEVER else f"{rough(seconds_since(started_at))} ago"

    @cached_property
    def environment(self) -> list[Row]:
        """The rows of the table ``environment`` of the newest command, one per node."""
        rows: list[Row] = tables.read_arrow(self.run, "environment").to_pylist()
        newest = max(rows, key=lambda row: str(row["started_at"]), default={})
        return [row for row in rows if row["command_id"] == newest["command_id"]]

    @cached_property
    def results(self) -> RunResults:
        """The results; those of a run that goes on are not all yet."""
        return results_of(self.run)


def summary(run: RunDirectory) -> Summary:
    """Return the summary of a run directory. Raises ConfigError if it cannot be read."""
    try:
        known = run_status.read(run)
        if known is None:  # damaged, or the first command has not written it yet
            return Summary(run, replace(_UNKNOWN, status="running") if is_held(run) else _UNKNOWN)
        if known.status == "running":
            if is_held(run):
                return Summary(run, known, seconds_since(known.updated_at))
            known = run_status.read(run) or known  # it may have ended since the status was read
    except OSError as error:
        raise ConfigError(f"{run.shown}: cannot be read: {error}") from error
    if known.status == "running":
        with suppress(ConfigError):  # what it had computed is in the tables
            known = replace(known, result=results_of(run).result)
        known = replace(known, status="interrupted", message=KILLED)
    return Summary(run, known)


def has_recovered(ledger: Ledger, failure: Row) -> bool:
    """Whether the unit of a failed attempt succeeded later; of another task, whether its stage."""
    unit, stage = failure["unit"], failure["stage"]
    variant = failure.get("variant", BASE)
    row = ledger.get("units", variant_name(unit, variant))
    if row is None and not unit.startswith(f"{stage}/"):
        row = ledger.get("stages", variant_name(stage, variant))
    return row is not None and row["status"] == "succeeded"


def failure_text(failure: Row) -> str:
    """Return what failed, how, and the last line of the message."""
    last = str(failure.get("message") or "").strip().rpartition("\n")[2]
    then = f" ({failure['outcome']})" if failure.get("outcome") else ""
    return f"{failure.get('unit')}: {failure.get('kind')}{then}: {last}"


# show


def show_text(run: RunDirectory) -> str:
    """Return the lines on a run.

    Raises:
        ConfigError: the run directory cannot be read.

    """
    lines, width = list(_lines(summary(run))), terminal_width()
    widest = max(len(name) for name, _ in lines)
    shown = []
    for name, text in lines:
        line = f"{name:{widest}}  {printable(text)}"
        shown.append(line if name in _COPIED else wrapped(line, width, indent=widest + 4))
    return "\n".join(shown)


def _lines(found: Summary) -> Iterator[tuple[str, str]]:
    run, known, environment = found.run, found.details, found.environment
    ledger, command = Ledger(run, writable=False), known.command
    yield "run", run.shown
    stages = f"{known.done} of {known.stages} stages" if known.stages else ""
    message = cell(first_line(known.message))
    yield "status", ", ".join(filter(None, (found.status, stages, found.progress, message)))
    profile = f", profile {known.profile}" if known.profile else ""
    yield "experiment", f"{known.experiment}{profile}"
    notes = run_notes.read(run)
    if notes.tags:
        yield "tags", " ".join(notes.tags)
    if notes.note:
        yield "note", notes.note
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
    yield from (("result", text) for text in _results(found.results))
    failures = [row for row in ledger.rows("failures") if not has_recovered(ledger, row)]
    for row in failures[-_MOST_FAILURES:]:
        yield "failure", cell(failure_text(row))
    if len(failures) > _MOST_FAILURES:
        yield "", f"all {len(failures)}: {_command('results', run, 'failures')}"
    if found.status == "running":
        yield "follow", _command("watch", run)
    elif found.status != "succeeded" and command:
        yield "continue", command
    if run.exists(page := f"{run.report}/index.html"):
        yield "report", page if run.is_local else f"{run.shown}/report/index.html"


def _command(verb: str, run: RunDirectory, *words: str) -> str:
    return shlex.join(["raypipe", verb, run.shown, *words])


def _results(found: RunResults) -> Iterator[str]:
    """Yield a line for each of the best results with the next ones, and for what is not finite."""
    for best in found.bests[:_MOST_MEASURES]:
        after = best.ranking[best.ties : _MOST_POINTS]
        parts = [_value(best.mean, best.text)]
        for each in after:
            repeated = f"mean of {each.runs}" if each.runs > 1 else ""
            parts.append(_value(each.mean, ", ".join(filter(None, (each.label, repeated)))))
        more = best.points - best.ties - len(after)
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


def _stages(rows: Sequence[Row]) -> str:
    """Return the stages: those that did not succeed, then the longest."""
    done = "succeeded"
    ranked = sorted(rows, key=lambda row: (row["status"] == done, -(row["duration_s"] or 0.0)))
    parts = []
    for row in ranked[:_MOST_STAGES]:
        status = "" if row["status"] == done else f" {row['status']}"
        name = variant_name(cell(row["stage"]), str(row["variant"]))
        parts.append(f"{name}{status} {rough(row['duration_s'] or 0.0)}")
    more = len(ranked) - len(parts)
    return ", ".join([*parts, *[f"and {more} more"] * (more > 0)])


def seconds_since(time: str) -> float:
    """Return the seconds since a time."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())


# watch


def watch(run: RunDirectory) -> int:
    """Follow a run until its command ends; return the exit status of that: 0, 1 or 130.

    On a terminal the last line is live, below the lines that the run prints; else there is a line
    every ten seconds. A run that has ended is shown once.

    Raises:
        ConfigError: the run directory cannot be read.

    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    period_s = _PERIOD_S if run.is_local else _REMOTE_PERIOD_S
    begun, last, was_running = "", 0, False  # the command whose lines are printed
    printed_at, printed = float("-inf"), ""
    # without a terminal nothing is live
    with console.status("", spinner="line") if console.is_terminal else nullcontext() as live:
        while True:
            found = summary(run)
            # the next command of a run begins with the lock, and then writes its status
            if found.status == "running" or was_running or not is_held(run):
                if begun != found.details.started_at:
                    begun, last = found.details.started_at, 0
                for number, line in found.details.messages:
                    if number > last:
                        console.print(without_credentials(line))
                        last = number
                if found.status != "running":
                    console.print(f"{ending_text(found)}: {run.shown}")
                    return {"succeeded": 0, "interrupted": 130}.get(found.status, 1)
                was_running, text = True, progress_text(found)
                if live is not None:
                    live.update(Text(text))
                elif time.monotonic() - printed_at >= _PLAIN_PERIOD_S and text != printed:
                    printed_at, printed = time.monotonic(), text
                    console.print(text)
            time.sleep(period_s)


def ending_text(found: Summary) -> str:
    """Return how a run ended, on a line."""
    known = found.details
    message = without_credentials(first_line(known.message))
    why = f" ({message})" if message else ""
    took = f" after {clock_text(found.duration_s)}" if found.duration_s is not None else ""
    stages = f"{known.done} of {known.stages} stages" if known.stages else ""
    parts = filter(None, (f"{found.status}{why}{took}", stages, found.details.result))
    return ", ".join(parts)


def progress_text(found: Summary) -> str:
    """Return how far a run is, and its running stages, on a line."""
    known = found.details
    parts = [f"{known.done} of {known.stages} stages done" if known.stages else "starting"]
    if found.duration_s is not None:
        parts.append(f"{clock_text(found.duration_s)} elapsed")
    stages = []
    for row in known.running:
        count = f"{row.get('done')}/{row['total']}" if row.get("total") else ""
        words = (str(row.get("stage")), count, str(row.get("note") or ""))
        stages.append(" ".join(filter(None, words)))
    return "; ".join(
        [", ".join([*parts, *filter(None, (found.jobs, known.left, known.use))]), *stages]
    )


# logs


def log_rows(run_dir: str) -> list[dict[str, Any]]:
    """Return a row per log, and per failed unit without one; also while the run goes on."""
    run = opened(run_dir)
    ledger = Ledger.to_read(run)
    failures: dict[str, list[Row]] = {}
    for row in ledger.rows("failures"):
        failures.setdefault(row["log"], []).append(row)
    sizes = {info.base_name: info.size or 0 for info in run.infos(run.logs)}
    units = {}
    for key, row in ledger.items("units") if sizes or failures else ():
        unit = _full({**row, "unit": key.removesuffix(f"@{row.get('variant', BASE)}")})
        units[run.log(unit).rpartition("/")[2]] = unit
    rows = []
    for name in sorted({*sizes, *failures}):
        failed = failures.get(name, [])
        unit, status, kind = units.get(name, name.removesuffix(_LOG)), "printed", ""
        if failed:
            last = failed[-1]
            unit, kind = _full(last), last["kind"]
            status = "failed" if last["outcome"] == "gave up" else last["outcome"]
            status = "recovered" if has_recovered(ledger, last) else status
        log = f"logs/{name}" if name in sizes else ""
        row = {"unit": unit, "status": status, "failures": len(failed), "kind": kind}
        rows.append({**row, "bytes": sizes.get(name, 0), "log": log})
    return rows


def logs_text(run_dir: str) -> str:
    """Return the list of logs as a table."""
    rows = log_rows(run_dir)
    return view(rows, terminal_width(), whole=True) if rows else f"{run_dir}: {_NO_LOGS}"


def log_text(run_dir: str, unit: str) -> str:
    """Return the log of a unit, task or trial by its name, or by that of its log.

    Without its variant, a name is that of the unit that failed last. The text has no control
    sequences, and a line that was written over, such as that of a progress bar, is its last state.

    Raises:
        ConfigError: there is no such log.

    """
    run = opened(run_dir)
    failures, logs = Ledger.to_read(run).rows("failures"), run.list(run.logs)
    asked = unit.removeprefix("logs/").removesuffix(_LOG)
    by_unit = {row["unit"]: row["log"] for row in failures}
    known = {*logs, *by_unit.values()}
    name = run.log(asked).rpartition("/")[2]
    name = name if name in known else by_unit.get(unit, "")
    if not known:
        raise ConfigError(f"{run.shown}: {_NO_LOGS}")
    if not name:
        near = did_you_mean(asked.replace("/", "-"), [each.removesuffix(_LOG) for each in known])
        raise ConfigError(
            f"{run.shown}: no log of {unit!r}; a unit that printed nothing and did not fail has "
            f"none (`raypipe logs {run.shown}` lists them){near}"
        )
    if name in logs:
        return shown_log(run.read(run.path("logs", name)).decode(errors="replace"))
    rows = (row for row in failures if row["log"] == name)
    return shown_log("\n".join(f"{r['kind']}: {r.get('traceback') or r['message']}" for r in rows))


def shown_log(content: str) -> str:
    """Return a log, or a part of it, without credentials and control sequences."""
    lines = map(last_state, without_credentials(content).split("\n"))
    return printable("\n".join(lines), keep="\n\t").rstrip()


def _full(row: Row) -> str:
    """Return the name of a unit in the whole run, as its log has it: it begins with its stage."""
    stage = variant_name(row["stage"], row.get("variant", BASE))
    first, slash, rest = row["unit"].partition("/")
    return f"{stage}{slash}{rest}" if first == row["stage"] else f"{stage}/{row['unit']}"
