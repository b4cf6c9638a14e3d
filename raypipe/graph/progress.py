"""Progress display: live on a terminal, otherwise plain lines.

The first line is the whole run: stages that ended, elapsed and remaining time, use of the machine.
Below it each running stage has a separate line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import psutil
import pynvml
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypipe.graph.notebook import WIDTH, NotebookView, in_notebook
from raypipe.graph.remaining import Forecast, Progress, Remaining, left
from raypipe.redaction import printable, without_credentials

#: seconds between plain lines of a stage, and of the run
_PLAIN_PERIOD_S, _RUN_PERIOD_S = 10.0, 30.0
_REFRESHES_PER_S = 4
#: seconds between looks at the machine, and the forecast's largest share of the time
_LOOK_S, _SHARE = 2.0, 50
_BAR, _MOST_NAMED = 12, 4
#: lines and stages of a snapshot, and the characters of a line
_MOST_SAID, _MOST_SHOWN, _LONGEST = 50, 50, 500
_FEWEST_COLUMNS_FOR_BARS, _FEWEST_COLUMNS_FOR_NOTES = 100, 60
#: columns that a line needs apart from the stage's name
_OTHER_COLUMNS = 62


@dataclass(frozen=True)
class _Line:
    """A running stage: its progress, a note in words, and when a plain line showed it last."""

    progress: Progress
    note: str = ""
    printed: float = 0.0


@dataclass(frozen=True)
class _Note:
    """A note whose last parts, which two spaces separate, are left out where it is too long."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self.text.split("  ")
        while len(parts) > 1 and len("  ".join(parts)) > options.max_width:
            parts.pop()
        yield Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


class Display:
    """Progress of the run and of each running stage, with elapsed and remaining time.

    Without a terminal there are no escape codes: one plain line per event, one every ten seconds
    while a stage advances, and one every 30 s for the whole run. In a notebook the live display is
    an output of the cell. May be used by several threads.

    Args:
        live: whether a terminal gets the live display. Otherwise it is left to others, such as a
            debugger, and the lines of the whole run are left out.

    """

    def __init__(self, *, live: bool = True) -> None:
        notebook = live and in_notebook()
        self.console = Console(
            file=sys.stdout,
            highlight=False,
            soft_wrap=True,
            width=WIDTH if notebook else None,
            force_jupyter=False,
        )
        self._is_live = notebook or (live and self.console.is_terminal)
        self._ticks = live and not self._is_live
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._ended: set[str] = set()
        self._forecast: Forecast | None = None
        self._phase = ""
        self._began = time.monotonic()
        self._said: deque[tuple[int, str]] = deque(maxlen=_MOST_SAID)
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        # texts that take long to make, each with the time until which it holds
        self._use, self._use_until = "", 0.0
        self._left, self._left_until = "", 0.0
        self._live = (
            NotebookView(self._rendered)
            if notebook
            else Live(
                console=self.console,
                get_renderable=self._rendered,
                refresh_per_second=_REFRESHES_PER_S,
                transient=True,
                auto_refresh=self._is_live,
            )
        )

    def __enter__(self) -> Display:
        if self._is_live:
            self._live.start()
        elif self._ticks:
            self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        if self._is_live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the live display, without credentials and control sequences."""
        text = printable(without_credentials(text), keep="\n\t")
        with self._lock:
            number = self._said[-1][0] + 1 if self._said else 1
            self._said.append((number, text[:_LONGEST]))
        self._print(text)

    def snapshot(self) -> dict[str, Any]:
        """Return what is shown, for those who look at the run from elsewhere.

        These are fields of :class:`~raypipe.store.run_status.RunStatus`.
        """
        parts = self._of_run()
        now = time.monotonic()
        with self._lock:
            lines, said, ended = dict(self._lines), tuple(self._said), len(self._ended)
            stages = self._forecast.stages if self._forecast is not None else 0
        running = [
            {
                "stage": key,
                "done": line.progress.done,
                "total": line.progress.total,
                "seconds": round(now - line.progress.began, 1),
                "note": without_credentials(line.note),
            }
            for key, line in list(lines.items())[:_MOST_SHOWN]
        ]
        left, use = parts[2:] if len(parts) == 4 else ("", "")
        return {
            "stages": stages,
            "ended": ended,
            "left": left,
            "use": use,
            "running": tuple(running),
            "messages": said,
        }

    def _print(self, text: str) -> None:
        self.console.print(without_credentials(text), markup=False)

    def prepare(self, text: str) -> None:
        """Show what the command does before its stages start, such as starting Ray."""
        self._phase = text
        if not self._is_live:
            self.say(f"{text} ...")

    def expect(self, forecast: Forecast, ended: Iterable[str] = ()) -> None:
        """Show the whole run from now on; it may be called again when stages were added."""
        with self._lock:
            self._forecast, self._left_until = forecast, 0.0
            self._ended.update(ended)

    def start(self, stage: str, note: str = "") -> None:
        """Show a stage that runs and has not reported anything yet."""
        with self._lock:
            self._lines[stage] = _Line(Progress(time.monotonic()), note)

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Show a stage with ``total`` units, of which some are done."""
        now = time.monotonic()
        with self._lock:
            self._lines[stage] = _Line(Progress(now, total, done, done), printed=now)
        if done:
            self.say(f"{stage}: started ({total - done} of {total} to do, the others are stored)")
        elif not self._is_live:
            self.say(f"{stage}: started ({total} to do)")

    def advance(self, stage: str, done: int, note: str = "") -> None:
        """Show the number of finished units of a stage."""
        now = time.monotonic()
        with self._lock:
            line = self._lines.get(stage) or _Line(Progress(now))
            progress = replace(line.progress, done=done)
            prints = not self._is_live and now - line.printed >= _PLAIN_PERIOD_S
            printed = now if prints else line.printed
            self._lines[stage] = _Line(progress, note, printed)
        if prints:
            rest = self._of_stage(stage, progress, now)
            rest += " left" if rest[:1].isdigit() else ""
            self._print("  ".join(filter(None, (f"{stage}: {_count(progress)}", note, rest))))

    def end(self, stage: str, status: str, seconds: float) -> None:
        """Show that a stage ended."""
        with self._lock:
            self._lines.pop(stage, None)
        self.say(f"{stage}: {status} in {seconds:.1f} s")

    def settle(self, stage: str) -> None:
        """Count a stage as ended, whether or not it had to run."""
        with self._lock:
            self._ended.add(stage)
            self._left_until = 0.0

    def _tick(self) -> None:
        while not self._closed.wait(_RUN_PERIOD_S):
            with self._lock:
                lines = dict(self._lines)
                is_over = self._forecast is None or len(self._ended) >= self._forecast.stages
            if not is_over and (parts := self._of_run()):
                shown = [f"{key} {_count(line.progress)}".rstrip() for key, line in lines.items()]
                more = f" and {len(shown) - _MOST_NAMED} more" * (len(shown) > _MOST_NAMED)
                parts.append(f"running: {', '.join(shown[:_MOST_NAMED]) or 'nothing'}{more}")
                self._print("run: " + ", ".join(parts))

    def _of_run(self) -> list[str]:
        """Return the parts of the line of the whole run; empty before it is known."""
        now = time.monotonic()
        with self._lock:
            forecast, lines, ended = self._forecast, dict(self._lines), set(self._ended)
        if forecast is None:
            elapsed = f"{clock_text(now - self._began)} elapsed"
            return [f"{self._phase} ...", elapsed] if self._phase else []
        if now >= self._left_until:
            running = {key: line.progress for key, line in lines.items()}
            rest = forecast.of_run(running, ended, now)
            is_late = rest.seconds == 0 and not rest.unknown and len(ended) < forecast.stages
            self._left = "longer than expected" if is_late else remaining_text(rest)
            self._left_until = now + max(0.5, _SHARE * (time.monotonic() - now))
        if now >= self._use_until:
            self._use, self._use_until = machine_use(), now + _LOOK_S
        done = f"{len(ended)} of {forecast.stages} stages done"
        return [done, f"{clock_text(now - self._began)} elapsed", self._left, self._use]

    def _of_stage(self, key: str, progress: Progress, now: float) -> str:
        """Return the remaining time of a stage in words; empty if unknown."""
        forecast = self._forecast
        if forecast is None:
            rest = left(None, progress, now)
        else:
            rest = forecast.of_stage(key, progress, now)
        if rest is not None and rest.seconds == 0 and progress.part < 1:
            return "overdue"
        return "" if rest is None else rough(rest.seconds)

    def _rendered(self) -> RenderableType:
        """Return the live display, cut to the terminal."""
        width, now = self.console.width, time.monotonic()
        with self._lock:
            lines = dict(self._lines)
        table = Table.grid(padding=(0, 1), expand=True)
        widest = max(8, width - _OTHER_COLUMNS)
        bars = width >= _FEWEST_COLUMNS_FOR_BARS and max(map(len, lines), default=0) <= widest
        widest += 0 if bars else _BAR
        notes = width >= _FEWEST_COLUMNS_FOR_NOTES
        table.show_header = True
        table.add_column("stage", max_width=widest, no_wrap=True, overflow="ellipsis")
        if bars:
            table.add_column(width=_BAR)
        for heading in ("done", "elapsed", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        begun = sorted(lines.items(), key=lambda item: item[1].progress.total == 0)  # stable
        room = max(1, self.console.height - 4)
        for key, line in begun[:room]:
            progress = line.progress
            bar = ProgressBar(progress.total or 1, progress.done, width=_BAR)
            cells: list[RenderableType] = [
                Text(_cut(key, widest)),
                *([bar if progress.total else Text()] if bars else []),
            ]
            cells += [
                Text(_count(progress)),
                Text(clock_text(now - progress.began)),
                Text(self._of_stage(key, progress, now) or "unknown" * bool(progress.total)),
                _Note(line.note if notes else ""),
            ]
            table.add_row(*cells)
        parts = self._of_run()
        while len(parts) > 1 and len(" · ".join(parts)) > width:
            parts.pop()
        whole = Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")
        shown: list[RenderableType] = [whole] if whole.plain else []
        shown += [table] if lines else []
        if len(begun) > room:
            shown.append(Text(f"and {len(begun) - room} more"))
        return Group(*shown)


def _cut(name: str, columns: int) -> str:
    """Return a name without its middle if it is too long: variants differ at the end."""
    if len(name) <= columns:
        return name
    tail = columns // 2
    return f"{name[: columns - tail - 1]}…{name[-tail:]}"


def _count(progress: Progress) -> str:
    return f"{progress.done}/{progress.total}" if progress.total else ""


def remaining_text(remaining: Remaining) -> str:
    """Return ``about 4 min left (3 to 6 min)``, or what is known of it."""
    about = rough(remaining.seconds)
    if remaining.unknown:
        at_least = f", at least {about}" if remaining.seconds >= 1 else ""
        return f"time left unknown{at_least}"
    if remaining.low is None or remaining.high is None:
        return f"about {about} left"
    low, high = rough(remaining.low), rough(remaining.high)
    if low == high:
        return f"about {about} left"
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return f"about {about} left ({low} to {high})"


def rough(seconds: float) -> str:
    """Return seconds in one unit, as exact as an estimate: ``45 s``, ``12 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"


def clock_text(seconds: float) -> str:
    """Return seconds as on a clock: ``1:23``, ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def machine_use() -> str:
    """Return the utilization of this machine's GPUs, or of its CPUs if it has none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return f"CPU {psutil.cpu_percent():.0f} %"
    try:
        handles: list[Any] = [
            pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
        ]
        shown = [f"{pynvml.nvmlDeviceGetUtilizationRates(handle).gpu}" for handle in handles]
        return f"GPU {'/'.join(shown)} %"
    finally:
        pynvml.nvmlShutdown()
