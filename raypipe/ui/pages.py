"""Pages of ``raypipe ui``: the table of runs, a run, and a comparison of several.

They are made of the report's parts when they are asked for. What takes long, such as plots, is made
again once the files that it follows from have changed.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

import pandas as pd
from jinja2 import Environment
from markupsafe import Markup
from pyarrow import fs as arrow_fs

from raypipe.commands import compare
from raypipe.commands.configuration import of_report, stored_document, stored_experiment
from raypipe.commands.listing import Seen, cells, runs
from raypipe.commands.results import results_of
from raypipe.commands.summary import (
    Summary,
    ending_text,
    failure_text,
    has_recovered,
    progress_text,
    shown_log,
    summary,
)
from raypipe.commands.table_view import cell
from raypipe.errors import ConfigError
from raypipe.redaction import shown_traceback, without_credentials
from raypipe.report import parts
from raypipe.report.formatting import counted
from raypipe.report.page import page_sections, said_of, summary_tiles
from raypipe.report.parts import Code, Fold, Link, Part, Pill, Section, TableView
from raypipe.report.plots import Plot, encode
from raypipe.report.results import RunResults, staged
from raypipe.report.sections import training_plots
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import RunStatus
from raypipe.store.tables import by_name, tables_of
from raypipe.ui import address

log = logging.getLogger(__name__)

#: seconds between looks of a page of which something runs on this disk, and of others
_PERIOD_S, _REST_PERIOD_S = 2, 10
#: share of the time in which the same thing is made again and again
_SHARE = 0.2
#: things that are kept, failures, logs, bytes of the end of each, and messages
_MOST_KEPT, _MOST_FAILURES, _MOST_LOGS, _TAIL_BYTES, _MOST_MESSAGES = 30, 10, 5, 8192, 20
#: sections of a run's page before those of its report
_OWN = ("Progress", "State", "Failures", "Output")

#: titles of sections by their ids, and their HTML
Made = tuple[Mapping[str, str], Markup]


@dataclass(frozen=True)
class Listed:
    """A run of the table: its summary, and the cells of its row by column."""

    summary: Summary
    cells: Mapping[str, str]

    @property
    def status(self) -> Pill:
        """Its status."""
        return Pill.of_status(self.summary.status)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers by which columns are sorted that are not sorted by their text."""
        started_at = datetime.fromisoformat(self.summary.details.started_at).timestamp()
        return {"started": started_at, "took": self.summary.duration_s or 0.0}


@dataclass(frozen=True)
class _Kept:
    """A part of a page, and the state of its files; ``due`` is when it may be made again."""

    state: Any
    value: Any
    due: float


class _PageCache:
    """Cache of the parts of pages that were asked for last; one of them is made at a time."""

    def __init__(self) -> None:
        self._lock, self._kept = Lock(), dict[Any, _Kept]()

    def get(self, name: Any, state: Any, make: Callable[[], Any], least_s: float = 0.0) -> Any:
        """Return what is made of files in a state, made again once it differs and time has passed.

        It is the seconds given, and more if it takes long to make.
        """
        with self._lock:
            kept, start = self._kept.pop(name, None), time.monotonic()
            if kept is None or (kept.state != state and start >= kept.due):
                value, end = make(), time.monotonic()
                kept = _Kept(state, value, end + max(least_s, (end - start) / _SHARE))
            self._kept[name] = kept
            if len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return kept.value


class Pages:
    """The pages over the runs in some folders, for requests in several threads."""

    def __init__(self, locations: Sequence[str]) -> None:
        self._seen: dict[str, Seen] = {location: {} for location in locations}
        self._lists, self._cache = _PageCache(), _PageCache()

    def runs(self) -> Mapping[str, Listed]:
        """Return the runs by key, the newest first. Raises ConfigError: a folder is unreadable."""
        now: Mapping[str, Listed] = self._lists.get("", time.monotonic(), self._look, 1.0)
        return now

    def _look(self) -> Mapping[str, Listed]:
        found: list[Listed] = []
        for location, seen in self._seen.items():
            summaries = runs(location, seen)
            shared = f"{location.rstrip('/')}/" if len(self._seen) == 1 else ""
            for each, texts in zip(summaries, cells(summaries, location), strict=True):
                texts["run"] = texts["run"].removeprefix(shared)
                found.append(Listed(each, {name: cell(text) for name, text in texts.items()}))
        found.sort(key=lambda each: each.numbers["started"], reverse=True)
        return {address.key(each.summary.run): each for each in found}

    def table(self) -> str:
        """Return the page with the table of runs. Raises ConfigError."""
        rows = self.runs()
        period_s = _period_s(each.summary for each in rows.values())
        values = {"rows": rows, "places": [RunDirectory.at(each).shown for each in self._seen]}
        return _page("runs.html", "Runs", None, ({}, Markup()), period_s, **values)

    def run(self, key: str) -> str:
        """Return the page of a run. Raises ConfigError: there is none."""
        found = self._summary(key)
        run, known = found.run, found.details
        is_running = found.status == "running"
        answers: dict[str, list[Part]] = {
            "Status": [progress_text(found) if is_running else ending_text(found)],
            "Message": [Code(shown_log(known.message))] if "\n" in known.message.strip() else [],
            "Command": [Code(cell(known.command))] if known.command else [],
            "Directory": [Code(run.shown)],
            "Report": [Link("of the newest command", f"/run/{key}/report")] * _has_report(run),
        }
        ledger = _state(run, "ledger")
        failures = self._cache.get((run, "failures"), ledger, lambda: _failures(run))
        now = [Section("State", [answers]), failures, Section("Output", list(_output(found)))]
        files = _state(run, "results") | (ledger if is_running else set())
        report = self._cache.get((run, "report"), files, lambda: _report(run, known, is_running))
        live = _made(now, _OWN[:1])
        sections = {**live[0], **report[0]}, live[1] + report[1]
        title, status = known.experiment or run.shown, Pill.of_status(found.status)
        period_s = _period_s([found])
        values = {"running": known.running, "about": said_of(run)}
        return _page("run.html", title, status, sections, period_s, **values)

    def comparison(self, keys: Sequence[str]) -> str:
        """Return the page that compares runs. Raises ConfigError: there are not two of them."""
        chosen = {key: self._summary(key) for key in keys}
        if len(chosen) < 2:
            raise ConfigError("choose two runs or more in the table of runs")
        directories = [found.run for found in chosen.values()]
        state = [(_state(each.run, "results"), each.status) for each in chosen.values()]
        sections = self._cache.get(tuple(chosen), state, lambda: _compared(chosen, directories))
        period_s = _period_s(chosen.values())
        return _page("run.html", "Comparison", None, sections, period_s, running=())

    def report(self, key: str) -> bytes:
        """Return the report that the newest command of a run wrote. Raises ConfigError: none."""
        run = self._summary(key).run
        if not _has_report(run):
            raise ConfigError("this run has no report")
        return run.read(f"{run.report}/index.html")

    def _summary(self, key: str) -> Summary:
        """Return what is known of a run by now. Raises ConfigError: there is none."""
        if (listed := self.runs().get(key)) is None:
            raise ConfigError("no such run: it was removed, or the address is incomplete")
        return summary(listed.summary.run)


def policy() -> str:
    """Return the policy of all pages, the report's among them."""
    asks = "connect-src 'self'; form-action 'self'"
    return f"{parts.policy(_templates(), 'live.js', 'page.js')}; {asks}"


def _templates() -> Environment:
    return parts.templates("raypipe.ui")


def _page(
    template: str, title: str, status: Pill | None, made: Made, period_s: int, **values: Any
) -> str:
    links, content = made
    shown = {"title": title, "status": status, "about": (), "links": links, "content": content}
    page = _templates().get_template(template)
    return page.render(policy=policy(), period_s=period_s, **{**shown, **values})


def _made(sections: Sequence[Section], before: Sequence[str] = ()) -> Made:
    """Return sections that have other ids than those with these titles."""
    found = parts.anchored([*(Section(title, [title]) for title in before), *sections])
    own = dict([*found.items()][len(before) :])
    content = parts.content(own, _drawing)
    gc.collect()  # figures are cycles of objects: a page that grows would keep 100 MiB an hour
    return {anchor: each.title for anchor, each in own.items()}, content


def _drawing(plot: Plot) -> tuple[str, Markup]:
    return parts.drawing(plot, encode(plot, ("svg",))["svg"])


def _period_s(found: Iterable[Summary]) -> int:
    is_live = any(each.status == "running" and each.run.is_local for each in found)
    return _PERIOD_S if is_live else _REST_PERIOD_S


def _state(run: RunDirectory, folder: str) -> frozenset[Any]:
    """Return the names, times and sizes of all files in a folder of a run."""
    infos = _below(run, run.path(folder))
    return frozenset((info.path, info.mtime_ns, info.size) for info in infos)


def _below(run: RunDirectory, folder: str) -> list[arrow_fs.FileInfo]:
    """Return the files below a folder of a run, and below no link to a folder."""
    if not run.is_local:
        return list(run.infos(folder, recursive=True))
    names = [f"{at}/{name}" for at, _, files in os.walk(folder) for name in files]
    return list(run.fs.get_file_info(names))


def _own_files(run: RunDirectory, folder: str) -> list[arrow_fs.FileInfo]:
    """Return the files in a folder of a run; none that a link has elsewhere."""
    root = Path(run.path()).resolve()
    if run.is_local and not Path(folder).resolve().is_relative_to(root):
        return []
    files = [i for i in _below(run, folder) if i.type == arrow_fs.FileType.File]
    if not run.is_local:
        return files
    return [info for info in files if Path(info.path).resolve().is_relative_to(root)]


def _has_report(run: RunDirectory) -> bool:
    paths = (info.path for info in _own_files(run, run.report))
    return f"{run.report}/index.html" in paths


def _output(found: Summary) -> Iterator[Part]:
    """Yield the last messages of the newest command, and the ends of the newest logs."""
    said = [without_credentials(text) for _, text in found.details.messages[-_MOST_MESSAGES:]]
    if said:
        yield Code("\n".join(said))
    run = found.run
    logs = sorted(_own_files(run, run.logs), key=lambda info: -(info.mtime_ns or 0))
    for info in logs[:_MOST_LOGS]:
        with run.fs.open_input_file(info.path) as file:
            begin = max(0, info.size - _TAIL_BYTES)
            file.seek(begin)
            text = shown_log(file.read(_TAIL_BYTES).decode(errors="replace"))
        yield Fold(f"Log {info.base_name}", [Code(f"...\n{text}" if begin else text)])


def _failures(run: RunDirectory) -> Section:
    """Return the newest failed attempts that no later one made good, else the newest ones."""
    try:
        ledger = Ledger.to_read(run)
    except ConfigError as error:
        return Section("Failures", [without_credentials(str(error))], "alert")
    rows = ledger.rows("failures")
    lost = [row for row in rows if not has_recovered(ledger, row)]
    folds: list[Part] = []
    for row in (lost or rows)[: -_MOST_FAILURES - 1 : -1]:
        text = shown_log(row.get("traceback") or row["message"])
        folds.append(Fold(without_credentials(failure_text(row)), [Code(text)]))
    count = f"{counted(len(rows), 'attempt')} failed"
    if len(lost) < len(rows):
        count += f", {len(rows) - len(lost)} of units that succeeded later"
    css = "alert" if lost else "alert recovered"
    return Section("Failures", [f"{count}.", *folds] if rows else [], css)


def _results(run: RunDirectory, known: RunStatus, is_running: bool) -> RunResults:
    """Return the results of a run by now, without the code of an experiment or a function.

    The tables of a stage that runs are those of the ledger: it writes them at its end.
    """
    found = replace(results_of(run, steps=True), command=known.command)
    if found.configuration and (document := stored_document(run)).function:
        found = replace(found, declared=of_report(stored_experiment(document)))
    if is_running:
        declared = {**(found.declared.core or {}), **by_name(found.declared.tables)}
        newest = tables_of(Ledger.to_read(run), declared, known.run_id)
        found = replace(found, tables={**found.tables, **newest}, directory=None)
    return found


def _report(run: RunDirectory, known: RunStatus, is_running: bool) -> Made:
    """Return the sections of a run's report, but for its failures, and without its experiment's."""
    try:
        results = _results(run, known, is_running)
        sections = [each for each in page_sections(results) if each.title != "Failures"]
        if is_running:  # the summary comes with the end of a stage
            sections.insert(0, Section("So far", [tuple(summary_tiles(results))]))
        return _made(sections, _OWN)
    except ConfigError as error:
        text = without_credentials(str(error))
    except Exception:  # of a foreign or damaged run; the others are shown
        log.error("%s: the results are not shown\n%s", run.shown, shown_traceback())  # noqa: TRY400
        text = "They cannot be shown; the terminal of raypipe ui says why."
    return _made([Section("Results", [text])], _OWN)


def _compared(chosen: Mapping[str, Summary], directories: Sequence[RunDirectory]) -> Made:
    """Return the sections of a comparison: tables, and the curves of all runs on the same plots."""
    found = compare.compare(directories)
    listed = {
        "run": [Link(f"run {n}", f"/run/{key}") for n, key in enumerate(chosen, 1)],
        "status": [Pill.of_status(each.status) for each in chosen.values()],
        "directory": [run.shown for run in directories],
        "result": [cell(each.details.result) for each in chosen.values()],
    }
    sections = [Section("Runs", [TableView(pd.DataFrame(listed), label="Runs")])]
    curves = list(_curves([results_of(run, steps=True) for run in directories]))
    sections.append(Section("Curves", curves))
    for title, rows in reversed(compare.tables(found).items()):
        view = TableView(pd.DataFrame(rows), label=title.capitalize())
        sections.append(Section(title.capitalize(), [view if rows else "No difference."]))
    return _made(sections, _OWN[:1])


def _curves(several: Sequence[RunResults]) -> Iterator[Plot]:
    """Draw the logged steps of runs, of which each trial is named by its run."""
    steps = []
    for number, run in enumerate(several, 1):
        if (rows := staged(run.tables, "steps")).empty:
            continue
        names = rows["trial_id"].astype(str).str.partition("@")
        point = names[2].map(lambda values: f",{values}" if values else "")
        steps.append(rows.assign(trial_id=names[0] + f"@run={number}" + point))
    if steps:
        yield from training_plots(replace(several[0], tables={"steps": pd.concat(steps)}))
