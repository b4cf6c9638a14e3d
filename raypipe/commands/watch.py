"""``raypipe watch``: follow a run that another process or machine writes, from its directory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from rich.console import Console
from rich.text import Text

from raypipe.commands.summary import Summary, summary
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
_MOST_EARLIER, _MOST_STAGES = 10, 20


def watch(run: RunDirectory, console: Console | None = None, period_s: float | None = None) -> int:
    """Follow a run until its command ends; return the exit status of that: 0, 1 or 130.

    On a terminal the last line is live, below the lines that the run prints; else there is a line
    every ten seconds. A run that has ended is shown once.

    Raises:
        ConfigError: the run directory cannot be read.

    """
    console = console or Console(highlight=False, soft_wrap=True)
    if period_s is None:
        period_s = _PERIOD_S if run.is_local else _REMOTE_PERIOD_S
    begun: str | None = None  # the command whose lines are printed
    last, was_running = 0, False
    printed_at, printed = float("-inf"), ""
    # without a terminal nothing is live
    with console.status("", spinner="line") if console.is_terminal else nullcontext() as live:
        for found in _looks(run, period_s):
            # the next command of a run begins with the lock, and then writes its status
            if found.status != "running" and not was_running and is_held(run):
                continue
            if begun != found.details.started_at:
                begun, last = found.details.started_at, 0
            for line in _new_lines(found.details.messages, last):
                console.print(without_credentials(line), markup=False, soft_wrap=True)
            last = max([last, *(number for number, _ in found.details.messages)])
            if found.status != "running":
                console.print(_ending(found), markup=False, soft_wrap=True)
                return {"succeeded": 0, "interrupted": 130}.get(found.status, 1)
            was_running, text = True, _progress(found)
            if live is not None:
                live.update(Text(text))
            elif time.monotonic() - printed_at >= _PLAIN_PERIOD_S and text != printed:
                printed_at, printed = time.monotonic(), text
                console.print(text, markup=False, soft_wrap=True)
    raise AssertionError


def _looks(run: RunDirectory, period_s: float) -> Iterator[Summary]:
    """Yield the summary again and again. Raises ConfigError."""
    failures = 0
    while True:
        try:
            found = summary(run)
        except OSError as error:
            failures += 1
            if failures > _PATIENCE:
                raise ConfigError(f"{run.shown}: cannot be read: {error}") from error
        else:
            failures = 0
            yield found
        time.sleep(period_s)


def _new_lines(messages: Sequence[tuple[int, str]], last: int) -> list[str]:
    """Return the lines after number ``last``, and how many of them are no longer there."""
    new = [(number, text) for number, text in messages if number > last]
    if last == 0:
        new = new[-_MOST_EARLIER:]
    elif new and new[0][0] > last + 1:
        return [f"({new[0][0] - last - 1} lines left out)", *(text for _, text in new)]
    return [text for _, text in new]


def _ending(found: Summary) -> str:
    known = found.details
    result = f", {found.result}" if found.result else ""
    message = first_line(known.message)
    why = f" ({without_credentials(message)})" if message else ""
    ended = f", {known.ended} of {known.stages} stages" if known.stages else ""
    took = f" after {clock_text(found.duration_s)}" if found.duration_s is not None else ""
    return f"{found.status}{why}{took}{ended}{result}: {found.run.shown}"


def _progress(found: Summary) -> str:
    """Return how far a run is, and its running stages, on a line."""
    known = found.details
    parts = [f"{known.ended} of {known.stages} stages done" if known.stages else "starting"]
    if found.duration_s is not None:
        parts.append(f"{clock_text(found.duration_s)} elapsed")
    stages = []
    for row in known.running[:_MOST_STAGES]:
        count = f"{row.get('done')}/{row['total']}" if row.get("total") else ""
        words = (str(row.get("stage")), count, str(row.get("note") or ""))
        stages.append(" ".join(filter(None, words)))
    return "; ".join([", ".join([*parts, *filter(None, (known.left, known.use))]), *stages])
