"""Progress display: live on a terminal, otherwise plain lines.

The first line is the whole run: stages that ended, elapsed and remaining time, use of the machine.
Below it each running stage has a separate line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import pynvml
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypipe.graph.durations import Estimate, left, remaining
from raypipe.graph.experiment import Stage
from raypipe.redaction import printable, without_credentials

#: seconds between plain lines of a stage, and of the run
_PLAIN_PERIOD_S, _RUN_PERIOD_S = 10.0, 30.0
#: seconds between looks at the machine and at the remaining time of the run
_LOOK_S = 2.0
#: characters of a bar, and stages that a plain line names
_BAR, _MOST_NAMED = 12, 4
#: lines and stages of a snapshot, and the characters of a line
_MOST_SAID, _MOST_SHOWN, _LONGEST = 50, 50, 500


@dataclass
class _StageLine:
    """Progress of a running stage: its units, of which the first were stored before."""

    total: int = 0
    first: int = 0
    done: int = 0
    note: str = ""
    began: float = field(default_factory=time.monotonic)
    printed: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """The seconds since it is shown."""
        return time.monotonic() - self.began


class Display:
    """Progress of the run and of each running stage, with elapsed and remaining time.

    Without a terminal there are no escape codes: one plain line per event, one every ten seconds
    while a stage advances, and one every 30 s for the whole run. A warning is shown once, and
    counted at the end. May be used by several threads.

    Args:
        live: whether a terminal gets the live display. Otherwise it is left to others, such as a
            debugger, and the lines of the whole run are left out.

    """

    def __init__(self, *, live: bool = True) -> None:
        self.console = Console(
            file=sys.stdout, highlight=False, soft_wrap=True, force_jupyter=False
        )
        self._is_live = live and self.console.is_terminal
        self._tells_run = live and not self._is_live
        self._lock = threading.RLock()
        self._said: deque[tuple[int, str]] = deque(maxlen=_MOST_SAID)
        self._warned: Counter[str] = Counter()
        self._stages: Sequence[Stage] = ()
        self._estimates: Mapping[str, Estimate | None] = {}
        self._capacity = 0.0, 0.0
        self._ended: set[str] = set()
        self._seen: tuple[str, str] = "", ""
        self._seen_until = self._told_until = 0.0
        self._began, self._note = time.monotonic(), ""
        self._running: dict[str, _StageLine] = {}
        self._live = Live(
            get_renderable=self.table, console=self.console, transient=True, refresh_per_second=4
        )

    def __enter__(self) -> Display:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_live:
            self._live.stop()
        for text, count in self._warned.items():
            if count > 1:
                self._print(f"{text} ({count} times)")

    def say(self, text: str, stage: str = "") -> None:
        """Print a line above the live display, without credentials and control sequences.

        A warning is shown once, whichever stages it is of.
        """
        text = printable(without_credentials(text), keep="\n\t")
        with self._lock:
            if text.startswith("WARNING"):
                self._warned[text] += 1
                if self._warned[text] > 1:
                    return
            text = f"{stage}: {text}" if stage else text
            number = self._said[-1][0] + 1 if self._said else 1
            self._said.append((number, text[:_LONGEST]))
        self._print(text)

    def snapshot(self) -> dict[str, Any]:
        """Return what is shown, for those who look at the run from elsewhere.

        These are fields of :class:`~raypipe.store.run_status.RunStatus`.
        """
        rest, use = self._look()
        with self._lock:
            running = [
                {
                    "stage": name,
                    "done": stage.done,
                    "total": stage.total,
                    "seconds": round(stage.elapsed, 1),
                    "note": without_credentials(stage.note),
                }
                for name, stage in [*self._running.items()][:_MOST_SHOWN]
            ]
            return {
                "stages": len(self._stages),
                "ended": len(self._ended),
                "left": rest,
                "use": use,
                "running": tuple(running),
                "messages": tuple(self._said),
            }

    def prepare(self, text: str) -> None:
        """Show what the command does before its stages start, such as starting Ray."""
        self._note = f"{text} ..."
        if not self._is_live:
            self.say(f"{text} ...")

    def expect(
        self,
        stages: Sequence[Stage],
        estimates: Mapping[str, Estimate | None],
        cpus: float,
        gpus: float,
    ) -> None:
        """Show the whole run from now on; it may be called again when stages were added.

        Args:
            stages: in an order in which each follows what it needs.
            estimates: the expected time of what is unfinished of each stage; None if unknown.
            cpus: the CPUs of all nodes.
            gpus: the GPUs of all nodes.

        """
        with self._lock:
            self._stages, self._estimates = tuple(stages), dict(estimates)
            self._capacity, self._seen_until = (cpus, gpus), 0.0

    def start(self, stage: str, note: str = "") -> None:
        """Show a stage that runs and has not reported anything yet."""
        with self._lock:
            self._running[stage] = _StageLine(note=note)

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Show a stage with ``total`` units, of which some are done."""
        with self._lock:
            self._running[stage] = _StageLine(total, done, done)
        if done:
            self.say(f"{stage}: started ({total - done} of {total} to do, the others are stored)")
        elif not self._is_live:
            self.say(f"{stage}: started ({total} to do)")

    def advance(self, stage: str, done: int, note: str = "") -> None:
        """Show the number of finished units of a stage."""
        with self._lock:
            shown = self._running.setdefault(stage, _StageLine())
            shown.done, shown.note, now = done, note, time.monotonic()
            if self._is_live or now < shown.printed + _PLAIN_PERIOD_S:
                return
            shown.printed = now
            rest = self._left_of(stage)
        rest += " left" * rest[:1].isdigit()
        count = _count(done, shown.total)
        self._print("  ".join(filter(None, (f"{stage}: {count}", note, rest))))

    def end(self, stage: str, status: str, seconds: float) -> None:
        """Show that a stage ended."""
        with self._lock:
            self._running.pop(stage, None)
        self.say(f"{stage}: {status} in {seconds:.1f} s")

    def settle(self, stage: str) -> None:
        """Count a stage as ended, whether or not it had to run."""
        with self._lock:
            self._ended.add(stage)
            self._seen_until = 0.0
            ended, running = len(self._ended), list(self._running)
            now = time.monotonic()
            if not self._tells_run or now < self._told_until or ended >= len(self._stages):
                return
            self._told_until = now + _RUN_PERIOD_S
        more = f" and {len(running) - _MOST_NAMED} more" * (len(running) > _MOST_NAMED)
        names = f"running: {', '.join(running[:_MOST_NAMED]) or 'nothing'}{more}"
        parts = [f"{ended} of {len(self._stages)} stages done", *self._look(), names]
        self._print("run: " + ", ".join(filter(None, parts)))

    def _print(self, text: str) -> None:
        self.console.print(without_credentials(text), markup=False)

    def table(self) -> Table:
        """Return the live display: a line for the run, and one for each running stage."""
        table = Table.grid(padding=(0, 1), expand=True)
        for justify in ("left", "left", "right", "right", "right", "left"):
            ratio = 1 if len(table.columns) == 5 else None
            table.add_column(no_wrap=True, overflow="ellipsis", justify=justify, ratio=ratio)

        def add(name: str, done: int, total: int, since: float, rest: str, note: str) -> None:
            bar = ProgressBar(total or 1, done if total else 0, width=_BAR)
            texts = _count(done, total), clock_text(time.monotonic() - since), rest, note
            table.add_row(Text(_short(name, self.console.width // 4)), bar, *map(Text, texts))

        rest, use = self._look()
        rest = rest.removeprefix("about ").removeprefix("time left ")
        with self._lock:
            ended, stages = len(self._ended), len(self._stages)
            add("run", ended, stages, self._began, rest, use or self._note)
            for name, each in self._running.items():
                add(name, each.done, each.total, each.began, self._left_of(name), each.note)
        return table

    def _rest(self, key: str) -> Estimate | None:
        """Return what is left of an unfinished stage; None if unknown."""
        estimate, stage = self._estimates.get(key), self._running.get(key)
        if stage is None:
            return estimate
        part = (stage.done - stage.first) / max(1, stage.total - stage.first) * bool(stage.total)
        return left(estimate, stage.elapsed, min(1.0, max(0.0, part)))

    def _left_of(self, key: str) -> str:
        """Return the remaining time of a running stage in words; empty if unknown."""
        rest, stage = self._rest(key), self._running[key]
        if rest is None:
            return ""
        return "overdue" if rest.seconds == 0 and stage.done < stage.total else rough(rest.seconds)

    def _look(self) -> tuple[str, str]:
        """Return the remaining time of the run and the use of the machine, in words."""
        with self._lock:
            now = time.monotonic()
            if now >= self._seen_until and self._stages:
                keys = [stage.key for stage in self._stages if stage.key not in self._ended]
                rest = remaining(self._stages, {k: self._rest(k) for k in keys}, *self._capacity)
                if rest is None:
                    text = "time left unknown"
                else:
                    text = f"about {rough(rest)} left" if rest or not keys else "overdue"
                self._seen, self._seen_until = (text, machine_use()), now + _LOOK_S
            return self._seen


def _short(name: str, most: int) -> str:
    """Return a name without its middle if it is too long: variants differ at the end."""
    if len(name) <= most:
        return name
    tail = most // 2
    return f"{name[: most - tail - 1]}…{name[-tail:]}"


def _count(done: int, total: int) -> str:
    return f"{done}/{total}" if total else ""


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
