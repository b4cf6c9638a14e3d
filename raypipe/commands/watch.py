"""``raypipe watch``: follow a run that another process or machine writes, from its directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypipe.commands.run_summary import Summary, summary
from raypipe.commands.table_view import shorten
from raypipe.errors import ConfigError
from raypipe.graph.progress import clock_text
from raypipe.graph.unit_logs import first_line
from raypipe.redaction import without_credentials
from raypipe.store.lock import is_held
from raypipe.store.run_directory import RunDirectory

#: seconds between looks: at a disk, and at an object store
_PERIOD_S, _REMOTE_PERIOD_S = 1.0, 5.0
#: seconds between plain lines of the progress
_PLAIN_PERIOD_S = 10.0
#: failing looks, one after the other, that are taken for a pause of the store
_PATIENCE = 5
#: lines that the run printed before the watching began, and running stages, at most
_MOST_EARLIER, _MOST_STAGES, _BAR = 10, 20, 12


def watch(run: RunDirectory, console: Console | None = None, period_s: float | None = None) -> int:
    """Follow a run until its command ends; return the exit status of that.

    On a terminal the progress is live, below the lines that the run prints; else there is a line
    every ten seconds. A run that has ended is shown once.

    Raises:
        ConfigError: the run directory cannot be read.

    """
    console = console or Console(highlight=False, soft_wrap=True)
    if period_s is None:
        period_s = _PERIOD_S if run.is_local else _REMOTE_PERIOD_S
    if not console.is_terminal:
        return _follow(run, _Plain(console), period_s)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def update(found: Summary) -> None:
            live.update(_rendered(found, console.width), refresh=True)

        return _follow(run, update, period_s, console)


def _follow(
    run: RunDirectory,
    show: Callable[[Summary], None],
    period_s: float,
    console: Console | None = None,
) -> int:
    console = console or getattr(show, "console", None) or Console()
    begun: str | None = None  # the command whose lines are printed
    last, failures, was_running = 0, 0, False
    while True:
        try:
            found = summary(run)
            # the next command of a run begins with the lock, and then writes its status
            starts = found.status != "running" and not was_running and is_held(run)
            failures = 0
        except OSError as error:
            failures += 1
            if failures > _PATIENCE:
                raise ConfigError(f"{run.shown}: cannot be read: {error}") from error
            time.sleep(period_s)
            continue
        details = found.details
        if details is not None and not starts:
            if begun != details.started_at:
                begun, last = details.started_at, 0
            for line in _new_lines(details.messages, last):
                console.print(without_credentials(line), markup=False, soft_wrap=True)
            last = max([last, *(number for number, _ in details.messages)])
        if found.status != "running" and not starts:
            console.print(_ending(found), markup=False, soft_wrap=True)
            return found.exit_status
        was_running = was_running or found.status == "running"
        if not starts:
            show(found)
        time.sleep(period_s)


class _Plain:
    """Prints the progress as a plain line, every ten seconds if it has changed."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._printed, self._text = float("-inf"), ""

    def __call__(self, found: Summary) -> None:
        now = time.monotonic()
        text = "; ".join([_whole(found), *map(_stage_text, _running(found))])
        if now - self._printed >= _PLAIN_PERIOD_S and text != self._text:
            self._printed, self._text = now, text
            self.console.print(text, markup=False, soft_wrap=True)


def _new_lines(messages: Sequence[tuple[int, str]], last: int) -> list[str]:
    """Return the lines after number ``last``, and how many of them are no longer there."""
    new = [(number, text) for number, text in messages if number > last]
    if last == 0:
        new = new[-_MOST_EARLIER:]
    elif new and new[0][0] > last + 1:
        return [f"({new[0][0] - last - 1} lines left out)", *(text for _, text in new)]
    return [text for _, text in new]


def _ending(found: Summary) -> str:
    result = f", {found.result}" if found.result else ""
    message = first_line(found.message)
    why = f" ({without_credentials(message)})" if message else ""
    ended = f", {found.ended} of {found.stages} stages" if found.stages else ""
    took = f" after {clock_text(found.duration_s)}" if found.duration_s is not None else ""
    return f"{found.status}{why}{took}{ended}{result}: {found.run.shown}"


def _whole(found: Summary) -> str:
    parts = [f"{found.ended} of {found.stages} stages done"] if found.stages else ["starting"]
    if found.duration_s is not None:
        parts.append(f"{clock_text(found.duration_s)} elapsed")
    if found.details is not None:
        parts += [part for part in (found.details.left, found.details.use) if part]
    return ", ".join(parts)


def _running(found: Summary) -> Sequence[Mapping[str, Any]]:
    """Return the running stages, with the seconds up to now."""
    if found.details is None:
        return ()
    written = datetime.fromisoformat(found.details.updated_at)
    since = max(0.0, (datetime.now(UTC) - written).total_seconds())
    return [
        {**row, "seconds": float(row.get("seconds") or 0.0) + since}
        for row in found.details.running[:_MOST_STAGES]
    ]


def _count(row: Mapping[str, Any]) -> str:
    return f"{row.get('done')}/{row['total']}" if row.get("total") else ""


def _stage_text(row: Mapping[str, Any]) -> str:
    parts = (str(row.get("stage")), _count(row), str(row.get("note") or ""))
    return " ".join(filter(None, parts))


def _rendered(found: Summary, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for _ in range(2):
        table.add_column(no_wrap=True)
    for _ in range(2):
        table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis")
    for row in _running(found):
        done, total = float(row.get("done") or 0), float(row.get("total") or 0)
        table.add_row(
            Text(shorten(str(row.get("stage")), max(12, width // 3))),
            ProgressBar(total, done, width=_BAR) if total else Text(),
            Text(_count(row)),
            Text(clock_text(row["seconds"])),
            Text(str(row.get("note") or "")),
        )
    head = Text(shorten(_whole(found), width), style="bold", no_wrap=True)
    return Group(head, table)
