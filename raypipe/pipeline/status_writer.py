"""Writer of a run's status: what the display shows, to be read from elsewhere."""

from __future__ import annotations

import logging
import math
import os
import platform
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raypipe.pipeline.comparison import frame_of
from raypipe.provenance import now
from raypipe.redaction import without_credentials
from raypipe.report.measures import LOSS, monitors_of, training_measures
from raypipe.storage import run_status
from raypipe.storage.ledger import Ledger, Row
from raypipe.storage.lock import LostLeaseError
from raypipe.storage.run_directory import BASE, RunDirectory
from raypipe.storage.run_status import KeyResult, RunStatus
from raypipe.storage.tables import Table

if TYPE_CHECKING:
    from raypipe.report.headlines import Headline

log = logging.getLogger(__name__)

#: seconds between writings: to a disk, and to an object store, where each one costs money
_PERIOD_S, _REMOTE_PERIOD_S = 2.0, 10.0
#: seconds for which the end of a command waits for a writing in progress
_PATIENCE_S = 10.0
#: values of a label of a key result, and the characters of each
_MOST_VALUES, _LONGEST = 4, 40
_LONGEST_MESSAGE = 2000


class StatusWriter:
    """Writes the status every few seconds in a thread, and at the end; nothing waits for it.

    Args:
        run_dir: the run directory, which this command has locked.
        status: the status at the start.
        snapshot: returns the fields that change (:meth:`Display.snapshot`).
        before_writing: raises LostLeaseError if another command has become the writer.

    """

    def __init__(
        self,
        run_dir: RunDirectory,
        status: RunStatus,
        snapshot: Callable[[], Mapping[str, Any]],
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        self._run_dir, self._snapshot, self._before = run_dir, snapshot, before_writing
        period = _PERIOD_S if run_dir.is_local else _REMOTE_PERIOD_S
        self._status = replace(status, period_s=period)
        #: the result that stands for the run, once it is known
        self.key_result = status.key_result
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._tick, name="status", daemon=True)

    def __enter__(self) -> StatusWriter:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status.status == "running" and error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.end("interrupted" if interrupted else "failed", str(error))
        self._over.set()
        self._thread.join(_PATIENCE_S)

    def end(self, status: str, message: str = "") -> None:
        """Write the outcome of the command."""
        self._over.set()
        self._thread.join(_PATIENCE_S)
        message = without_credentials(message)[:_LONGEST_MESSAGE]
        self._status = replace(self._status, status=status, message=message)
        self._write(durable=True)

    def _tick(self) -> None:
        while True:
            if not self._write() or self._over.wait(self._status.period_s):
                return

    def _write(self, *, durable: bool = False) -> bool:
        """Write the status; return whether to go on."""
        with self._lock:
            try:
                self._before()
                found = {**self._snapshot(), "key_result": self.key_result, "updated_at": now()}
                if self._status.status != "running":
                    found |= {"left": "", "use": "", "running": ()}
                self._status = replace(self._status, **found)
                content = self._status.to_bytes()
                self._run_dir.write(self._run_dir.status, content, durable=durable)
            except LostLeaseError:
                return False
            except Exception as error:
                log.warning("%s: the status was not written: %s", self._run_dir.shown, error)
        return True


def first_status(
    run_dir: RunDirectory, experiment: str, run_id: str, command: str, profile: str, code: str
) -> RunStatus:
    """Return the status at the start of a command; it goes on with that of the earlier ones."""
    at = now()
    try:
        earlier = run_status.read(run_dir)
    except OSError:
        earlier = None
    status = RunStatus(
        experiment,
        run_id,
        command,
        "running",
        at,
        at,
        at,
        profile=profile,
        code=code,
        host=platform.node(),
        pid=os.getpid(),
    )
    if earlier is None or earlier.run_id != run_id:
        return status
    return replace(
        status,
        first_started_at=earlier.first_started_at,
        earlier_s=earlier.duration_s,
        commands=earlier.commands + 1,
        key_result=earlier.key_result,
    )


def key_result(
    ledger: Ledger,
    own: Iterable[Table],
    tables: Mapping[str, Table],
    settings: Mapping[str, Any] | None = None,
) -> KeyResult | None:
    """Return the best value of the first measure that has one; None if there is none.

    Measures and means over repetitions are those of the report: the experiment's own tables come
    first, then the evaluations of its trainings (the monitored one first), then the training loss.
    Trials that measure speed are too short to have a result.
    """
    from raypipe.report.about import training_headlines  # with matplotlib, slow to import
    from raypipe.report.sweep_trials import SWEEP

    own = list(own)
    rows = {name: ledger.rows(name) for name in {"variants", "trials", *(t.name for t in own)}}
    for table in own:
        if found := _headlines(table, rows):
            return _key_result(found[0])
    if ((settings or {}).get("sweep") or {}).get("kind") == "systems":
        rows["trials"] = [row for row in rows["trials"] if row.get("stage") != SWEEP]
    trials = tables.get("trials")
    candidates = [(table, column) for table in own for column in table.columns]
    if trials is not None and rows["trials"]:
        monitors = monitors_of(settings or {})
        frames = {name: frame_of(rows[name]) for name in ("variants", "trials")}
        if varied := training_headlines(frames, trials.columns, monitors):
            return _key_result(next(iter(varied.values())))
        names = frames["trials"].columns
        metrics = training_measures(names, trials.columns, monitors)
        candidates += [(trials, column) for column in (*metrics, LOSS, *trials.columns)]
    for table, column in candidates:
        if not column.better:
            continue
        known = [row for row in rows[table.name] if _is_number(row.get(column.name))]
        if known:
            choose = min if column.better == "lower" else max
            best = choose(known, key=lambda row: float(row[column.name]))
            label = _label(best, known, table)
            value = float(best[column.name])
            return KeyResult(table.name, column.name, value, column.better, label)
    return None


def no_number(ledger: Ledger, own: Iterable[Table]) -> str:
    """Return which measures of an experiment's tables are not finite in any row; may be empty."""
    return "; ".join(
        f"{table.name}.{column.name} is not finite in any of {len(rows)} rows"
        for table in own
        if (rows := ledger.rows(table.name))
        for column in table.columns
        if column.better and not any(_is_number(row.get(column.name)) for row in rows)
    )


def _headlines(table: Table, rows: Mapping[str, Sequence[Row]]) -> list[Headline]:
    """Return the best points of a table, none if it declares no measure or has no rows."""
    if not rows[table.name] or not any(column.better for column in table.columns):
        return []
    from raypipe.report.about import joined

    return joined(
        table, frame_of(rows[table.name]), {"variants": frame_of(rows["variants"])}
    ).headlines


def _key_result(best: Headline) -> KeyResult:
    parts = [best.group, best.point, f"mean of {best.runs}" if best.runs > 1 else ""]
    label = without_credentials(", ".join(filter(None, parts)))
    return KeyResult(best.table, best.column.name, best.mean, best.column.better, label)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _label(best: Row, rows: Iterable[Row], table: Table) -> str:
    """Return the texts that tell a row from the others."""
    names = [
        column.name for column in table.columns if column.type == "text" and column.name != "worker"
    ]
    varying = [name for name in names if len({row.get(name) for row in rows}) > 1]
    parts = [str(best[name])[:_LONGEST] for name in varying if best.get(name) is not None]
    if (variant := best.get("variant", BASE)) != BASE:
        parts.append(str(variant))
    return without_credentials(", ".join(parts[:_MOST_VALUES]))
