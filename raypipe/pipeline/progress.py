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
    """Stages, units done of total, rate and remaining time, and how busy the machine is.

    Without a terminal there are no escape codes: one plain line an event, and one every ten
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
        """One line, above the live display; an error's may quote credentials."""
        self.console.print(without_credentials(text), markup=False)

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """A stage starts: ``total`` pieces, some of them already done."""
        self._printed[stage] = time.monotonic()
        self._done[stage], self._total[stage] = done, total
        self._tasks[stage] = self._progress.add_task(stage, total=total, completed=done, note="")
        if not self._live:
            stored = f", {done} of them stored" if done else ""
            self.say(f"{stage}: started ({total} to do{stored})")

    def advance(self, stage: str, done: int, note: str = "") -> None:
        """So many pieces of a stage are done now."""
        self._done[stage] = done
        now = time.monotonic()
        period = _LIVE_PERIOD_S if self._live else _PLAIN_PERIOD_S
        if now - self._printed[stage] < period:  # asking the machine takes longer than a short unit
            self._progress.update(self._tasks[stage], completed=done)
            return
        self._printed[stage] = now
        busy = f"{note}  {machine_use()}"
        self._progress.update(self._tasks[stage], completed=done, note=busy)
        if not self._live:
            self.say(f"{stage}: {done}/{self._total[stage]}  {busy}".rstrip())

    def end(self, stage: str, status: str, seconds: float) -> None:
        """A stage ended."""
        if stage in self._tasks:
            self._progress.remove_task(self._tasks.pop(stage))
        self.say(f"{stage}: {status} in {seconds:.1f} s")


def machine_use() -> str:
    """The utilisation of this machine's GPUs, or of its CPUs where it has none."""
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
