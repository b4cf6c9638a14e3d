"""Progress display, live on a terminal, otherwise plain lines, and the remaining time of a run.

The first line is the whole run: stages that ended, elapsed and remaining time, use of the machine.
Below it each running stage has a separate line, as far as the terminal has room, and the last line
counts the others.

The expected time of a stage is the median of the measured rates, times the **work** that is left:
the samples of a training, or the budgets of other units. A rate holds for the same settings on the
same type of machine, apart from settings that only say how much there is to do. Something new has
no estimate: ``None`` instead of a guess. A running stage has its own rate.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import psutil
import pynvml
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypipe.config.matrix import is_seed
from raypipe.graph.experiment import Stage, Unit, Units
from raypipe.graph.identity import fingerprint
from raypipe.hardware import Hardware
from raypipe.redaction import printable, without_credentials
from raypipe.store.cache import Cache

#: seconds between plain lines of a stage
_PLAIN_PERIOD_S = 10.0
#: seconds between looks at the machine and at the remaining time of the run
_LOOK_S = 2.0
#: characters of a bar
_BAR = 12
#: lines of the terminal that the live display leaves to messages
_FREE_LINES = 2
_WARNING, _FAILURE, _BAR_STYLE = "yellow", "red", "cyan"
#: lines and stages of a snapshot, and the characters of a line
_MOST_SAID, _MOST_SHOWN, _LONGEST = 50, 50, 500
#: settings that change how much work there is, or which of several equal works it is
_AMOUNTS = frozenset({"steps", "epochs", "seed", "runs", "evaluations", "iterations"})
#: measured runs of a stage that are kept
_MOST = 20
#: part of a stage that must be done before its own rate counts
_FEWEST = 0.02


@dataclass
class _StageLine:
    """Progress of a running stage: its units, of which the first were stored before.

    One that ``waits`` for resources has not begun.
    """

    total: int = 0
    first: int = 0
    done: int = 0
    note: str = ""
    waits: bool = False
    began: float = field(default_factory=lambda: time.monotonic())
    printed: float = field(default_factory=lambda: time.monotonic())


class Display:
    """Progress of the run and of each running stage, with elapsed and remaining time.

    Without a terminal there are no escape codes: one plain line per event, and one every ten
    seconds while a stage advances. A warning is shown once, and counted at the end. May be used by
    several threads.

    Args:
        live: whether a terminal gets the live display. Otherwise it is left to others, such as a
            debugger.

    """

    def __init__(self, *, live: bool = True) -> None:
        self.console = Console(
            file=sys.stdout, highlight=False, soft_wrap=True, force_jupyter=False
        )
        self._is_live = live and self.console.is_terminal
        self._lock = threading.RLock()
        self._said: deque[tuple[int, str]] = deque(maxlen=_MOST_SAID)
        self._numbers = count(1)
        self._warned: Counter[str] = Counter()
        self._stages: Sequence[Stage] = ()
        self._estimates: Mapping[str, Estimate | None] = {}
        self._capacity: tuple[float, float]  # of the nodes; known with the stages
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._seen: tuple[str, str] = "", ""
        self._began, self._note = time.monotonic(), ""
        self._next_look = self._began
        self._running: dict[str, _StageLine] = {}
        #: of stages whose units other commands compute, too: how many are done of how many
        self.counts: dict[str, Callable[[], tuple[int, int]]] = {}
        self._live = Live(get_renderable=self.table, console=self.console, transient=True)

    def __enter__(self) -> Display:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_live:
            self._live.stop()
        for text, times in self._warned.items():
            if times > 1:
                self._print(f"{text} ({times} times)", _WARNING)

    def fail(self, text: str) -> None:
        """Print a failure, as ``say`` does."""
        self.say(text, style=_FAILURE)

    def say(self, text: str, stage: str = "", style: str = "") -> None:
        """Print a line above the live display, without credentials and control sequences.

        A warning is shown once, whichever stages it is of.
        """
        text = printable(without_credentials(text), keep="\n\t")
        with self._lock:
            if text.startswith("WARNING"):
                style = _WARNING
                self._warned[text] += 1
                if self._warned[text] > 1:
                    return
            text = f"{stage}: {text}" if stage else text
            self._said.append((next(self._numbers), text[:_LONGEST]))
        self._print(text, style)

    def snapshot(self) -> dict[str, Any]:
        """Return what is shown, for those who look at the run from elsewhere.

        These are fields of :class:`~raypipe.store.run_status.RunStatus`.
        """
        rest, use = self._look()
        known = dict(self.counts)  # stages that end remove theirs
        counts = {name: known[name]() for name in [*self._running] if name in known}
        with self._lock:
            counts = {n: (each.done, each.total) for n, each in self._running.items()} | counts
            running = [
                {
                    "stage": name,
                    "done": counts[name][0],
                    "total": counts[name][1],
                    "seconds": round(time.monotonic() - stage.began, 1),
                    "note": without_credentials(stage.note),
                }
                for name, stage in [*self._running.items()][:_MOST_SHOWN]
            ]
            return {
                "stages": len(self._stages),
                "done": len(self._ended - self._failed),
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
            self._capacity, self._next_look = (cpus, gpus), self._began

    def start(self, stage: str, note: str = "", *, waits: bool = False) -> None:
        """Show a stage that has not reported anything yet, and may wait for resources."""
        with self._lock:
            self._running[stage] = _StageLine(note=note, waits=waits)

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
            shown.done, shown.note, shown.waits, now = done, note, False, time.monotonic()
            if self._is_live or now < shown.printed + _PLAIN_PERIOD_S:
                return
            shown.printed = now
            rest = self._left_of(stage)
        rest += " left" * rest[:1].isdigit()
        text = f"{stage}: {_count(done, shown.total)}"
        self._print("  ".join(filter(None, (text, note, rest))))

    def end(self, stage: str, status: str, seconds: float, result: str = "") -> None:
        """Show that a stage ended, and the number that stands for its result."""
        with self._lock:
            self._running.pop(stage, None)
            if status != "succeeded":
                self._failed.add(stage)
        text = f"{stage}: {status} in {seconds:.1f} s"
        style = "" if status == "succeeded" else _FAILURE
        self.say(f"{text}, {result}" if result else text, style=style)

    def settle(self, stage: str) -> None:
        """Count a stage as ended, whether or not it had to run."""
        with self._lock:
            self._ended.add(stage)
            self._next_look = self._began

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(without_credentials(text), markup=False, style=style)

    def table(self) -> Group:
        """Return the live display: a line for the run, and one for each running stage.

        Stages that wait, and those for which the terminal has no line, are counted in the last one.
        """
        table = Table.grid(padding=(0, 1), expand=True)
        for justify in ("left", "left", "right", "right", "right"):
            table.add_column(no_wrap=True, overflow="ellipsis", justify=justify)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)

        def add(name: str, done: int, total: int, since: float, rest: str, note: str) -> None:
            bar = ProgressBar(total, done, _BAR, complete_style=_BAR_STYLE) if total else ""
            texts = _count(done, total), clock_text(time.monotonic() - since), rest, note
            named = _short(short_name(name), 3 * self.console.width // 10)
            table.add_row(Text(named), bar, *map(Text, texts))

        rest, use = self._look()
        rest = rest.removeprefix("about ").removeprefix("time left ")
        with self._lock:
            ended, stages = len(self._ended), len(self._stages)
            add("run", ended, stages, self._began, rest, use or self._note)
            working = {name: each for name, each in self._running.items() if not each.waits}
            waiting = stages - ended - len(working)
            room = self.console.height - _FREE_LINES - 1
            room = max(1, room - (waiting > 0 or len(working) > room))
            for name, each in [*working.items()][:room]:
                add(name, each.done, each.total, each.began, self._left_of(name), each.note)
            counts = {"running": len(working) - room, "waiting": waiting}
        others = ", ".join(f"+{number} {what}" for what, number in counts.items() if number > 0)
        return Group(table, Text(others)) if others else Group(table)

    def _rest(self, key: str) -> Estimate | None:
        """Return what is left of an unfinished stage; None if unknown."""
        estimate, stage = self._estimates.get(key), self._running.get(key)
        if stage is None:
            return estimate
        todo = stage.total - stage.first
        part = (stage.done - stage.first) / todo if todo else 0.0
        return left(estimate, time.monotonic() - stage.began, part)

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
            if now >= self._next_look and self._stages:
                keys = [stage.key for stage in self._stages if stage.key not in self._ended]
                rest = remaining(self._stages, {k: self._rest(k) for k in keys}, *self._capacity)
                if rest is None:
                    text = "time left unknown"
                else:
                    text = f"about {rough(rest)} left" if rest or not keys else "overdue"
                self._seen, self._next_look = (text, machine_use()), now + _LOOK_S
            return self._seen


def short_name(stage: str) -> str:
    """Return a stage of a matrix in few characters: ``train lr=0.01 s0``."""
    name, _, variant = stage.partition("@")
    values = [part.partition("=")[::2] for part in variant.split(",") if part]
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in values if not is_seed(key)]
    return " ".join([name, *words, *(f"s{value}" for key, value in values if is_seed(key))])


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
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        shown = [f"{pynvml.nvmlDeviceGetUtilizationRates(handle).gpu}" for handle in handles]
        return f"GPU {'/'.join(shown)} %"
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True)
class Estimate:
    """Expected seconds of a stage, and those of the CPUs and GPUs that it reserves."""

    seconds: float
    cpu_s: float = 0.0
    gpu_s: float = 0.0

    def times(self, factor: float) -> Estimate:
        """Return the estimate of ``factor`` times as much work."""
        return Estimate(factor * self.seconds, factor * self.cpu_s, factor * self.gpu_s)


class Durations:
    """Measured rates in the user's cache; several processes may use them at once."""

    def __init__(self, nodes: Sequence[Hardware]) -> None:
        kinds = sorted([node.cpus, *(gpu.name for gpu in node.gpus)] for node in nodes)
        self._machine = fingerprint(kinds)

    def remember(self, stage: Stage, units: Sequence[Unit], took: Estimate) -> None:
        """Record what these units of a stage took."""
        if not units:
            return
        rate, key = took.times(1 / _work(stage, units)), self._key(stage)
        with Cache("durations") as cache:
            rates = cache.get([key]).get(key, {}).get("rates", [])
            rates = [*rates, [rate.seconds, rate.cpu_s, rate.gpu_s]][-_MOST:]
            cache.put({key: {"rates": rates}})

    def estimates(
        self, stages: Iterable[tuple[Stage, Sequence[Unit]]]
    ) -> dict[str, Estimate | None]:
        """Return the expected time of each stage for the given units by key; None if unknown."""
        asked = {stage.key: (self._key(stage), _work(stage, units)) for stage, units in stages}
        with Cache("durations") as cache:
            stored = cache.get({key for key, _ in asked.values()})
        return {s: _estimate(stored.get(key, {}), amount) for s, (key, amount) in asked.items()}

    def _key(self, stage: Stage) -> str:
        settings = _without_amounts(stage.units[0].composed.shared)
        return fingerprint([self._machine, stage.name, settings])


def left(estimate: Estimate | None, elapsed: float, part: float) -> Estimate | None:
    """Return what is left of a stage after some seconds, of which a part is done; None if unknown.

    Once enough of it is done, its own rate counts.
    """
    # a script may go on after the steps that it was asked for
    own = elapsed * max(0.0, 1 - part) / part if part >= _FEWEST else None
    if estimate is None or not estimate.seconds:
        return estimate if own is None else Estimate(own)
    rest = max(0.0, estimate.seconds - elapsed) if own is None else own
    return estimate.times(rest / estimate.seconds)


def remaining(
    stages: Sequence[Stage], left: Mapping[str, Estimate | None], cpus: float, gpus: float
) -> float | None:
    """Return the seconds until stages have ended; None if the rest of one is unknown.

    It is the larger of two bounds that no schedule can beat: the longest chain of stages, and the
    time in which the nodes have as many CPU and GPU seconds as are left (Graham, Bounds on
    multiprocessing timing anomalies, 1969).

    Args:
        stages: in an order in which each follows what it needs.
        left: what is left of each unfinished stage by key.
        cpus: the CPUs of all nodes.
        gpus: the GPUs of all nodes.

    """
    known = [each for each in left.values() if each is not None]
    if len(known) < len(left):
        return None
    ends: dict[str, float] = {}
    for stage in stages:
        own = left.get(stage.key)
        start = min(max(map(ends.__getitem__, needs), default=0.0) for needs in stage.starts)
        start += own.seconds if own is not None else 0.0
        ends[stage.key] = max([start, *map(ends.__getitem__, stage.needed_keys)])
    on_cpus = sum(each.cpu_s for each in known) / cpus
    on_gpus = [sum(each.gpu_s for each in known) / gpus] if gpus else []
    return max(on_cpus, *on_gpus, *ends.values())


def _work(stage: Stage, units: Sequence[Unit]) -> int:
    """Return the size of units: samples or epochs of a training, otherwise their budgets."""
    if isinstance(units, Units):  # there may be a million, each with a budget of one
        return len(units)
    if stage.training is None:
        return sum(unit.budget for unit in units)
    trained = stage.training.settings.training  # which a unit of a sweep's winner leaves out
    samples = trained.effective_batch if trained.length_in == "steps" else None
    return len(units) * trained.length * (samples or 1)


def _estimate(stored: Mapping[str, Any], amount: int) -> Estimate | None:
    if not amount:
        return Estimate(0.0)
    rates = stored.get("rates")
    if not rates:
        return None
    return Estimate(*map(median, zip(*rates, strict=True))).times(amount)


def _without_amounts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that only say how much there is to do."""
    return {
        key: _without_amounts(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in _AMOUNTS
    }
