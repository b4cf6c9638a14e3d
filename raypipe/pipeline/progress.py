"""Progress display: live on a terminal, otherwise one plain line per event."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

import psutil
import pynvml
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from raypipe.redaction import without_credentials

_PLAIN_PERIOD_S = 10.0
_LIVE_PERIOD_S = 0.5


class Display:
    """Progress of stages: units done, rate, remaining time, and use of the machine.

    Without a terminal there are no escape codes: one plain line per event, and one every ten
    seconds while a stage advances.
    """

    def __init__(self) -> None:
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._live = self.console.is_terminal
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self._live,
        )
        self._tasks: dict[str, TaskID] = {}
        self._done: dict[str, float] = {}
        self._total: dict[str, int] = {}
        self._printed: dict[str, float] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the live display, with credentials redacted."""
        self.console.print(without_credentials(text), markup=False)

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Show a stage with ``total`` units, of which some are done."""
        self._printed[stage] = time.monotonic()
        self._done[stage], self._total[stage] = done, total
        self._tasks[stage] = self._progress.add_task(stage, total=total, completed=done, note="")
        if not self._live:
            stored = f", {done} already stored" if done else ""
            self.say(f"{stage}: started ({total} to do{stored})")

    def advance(self, stage: str, done: int, note: str = "") -> None:
        """Show the number of finished units of a stage."""
        self._done[stage] = done
        now = time.monotonic()
        period = _LIVE_PERIOD_S if self._live else _PLAIN_PERIOD_S
        if now - self._printed[stage] < period:  # machine queries can outlast a unit
            self._progress.update(self._tasks[stage], completed=done)
            return
        self._printed[stage] = now
        busy = f"{note}  {machine_use()}"
        self._progress.update(self._tasks[stage], completed=done, note=busy)
        if not self._live:
            self.say(f"{stage}: {done}/{self._total[stage]}  {busy}".rstrip())

    def end(self, stage: str, status: str, seconds: float) -> None:
        """Show that a stage ended."""
        if stage in self._tasks:
            self._progress.remove_task(self._tasks.pop(stage))
        self.say(f"{stage}: {status} in {seconds:.1f} s")


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
