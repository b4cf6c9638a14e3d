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
from typing import Any

from raypipe.provenance import now
from raypipe.redaction import without_credentials
from raypipe.storage import run_status
from raypipe.storage.ledger import Ledger, Row
from raypipe.storage.lock import LostLeaseError
from raypipe.storage.run_directory import BASE, RunDirectory
from raypipe.storage.run_status import KeyResult, RunStatus
from raypipe.storage.tables import Column, Table

log = logging.getLogger(__name__)

#: seconds between writings: to a disk, and to an object store, where each one costs money
_PERIOD_S, _REMOTE_PERIOD_S = 2.0, 10.0
#: seconds for which the end of a command waits for a writing in progress
_PATIENCE_S = 10.0
#: values of a label of a key result, and the characters of each
_MOST_VALUES, _LONGEST = 4, 40
_LONGEST_MESSAGE = 2000
#: the training loss, and the loss on held-out data, which a task need not declare
_LOSS, _EVAL_LOSS = "loss_final", Column("eval_loss", "real", "Held-out loss.", better="lower")


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
    ledger: Ledger, own: Iterable[Table], tables: Mapping[str, Table]
) -> KeyResult | None:
    """Return the best value of the first declared measure that has one; None if there is none.

    The experiment's own tables come first, as the report reads them: a mean over repetitions. Then
    come the trainings' metrics, then their held-out loss, then their training loss.
    """
    own = list(own)
    for table in own:
        if (found := _headline(table, ledger.rows(table.name))) is not None:
            return found
    trials = tables.get("trials")
    candidates = [(table, column) for table in own for column in table.columns]
    if trials is not None:
        metrics = list(reversed(trials.columns))
        names = [column.name for column in metrics]
        if _EVAL_LOSS.name not in names and _LOSS in names:
            metrics.insert(names.index(_LOSS), _EVAL_LOSS)
        candidates += [(trials, column) for column in metrics]
    for table, column in candidates:
        if not column.better:
            continue
        rows = [row for row in ledger.rows(table.name) if _is_number(row.get(column.name))]
        if rows:
            choose = min if column.better == "lower" else max
            best = choose(rows, key=lambda row: float(row[column.name]))
            label = _label(best, rows, table)
            value = float(best[column.name])
            return KeyResult(table.name, column.name, value, column.better, label)
    return None


def _headline(table: Table, rows: Sequence[Row]) -> KeyResult | None:
    """Return the best point of a table; None if it declares no measure, or has several variants."""
    if not rows or not any(column.better for column in table.columns):
        return None
    if any(row.get("variant", BASE) != BASE for row in rows):
        return None
    import pandas as pd  # with matplotlib, slow to import

    from raypipe.report.headlines import headlines
    from raypipe.report.table_shape import plain, shape_of

    frame = plain(pd.DataFrame(rows))
    found = headlines(table, frame, shape_of(table, frame))
    if not found:
        return None
    best = found[0]
    parts = [best.group, best.point, f"mean of {best.runs}" if best.runs > 1 else ""]
    label = without_credentials(", ".join(filter(None, parts)))
    return KeyResult(table.name, best.column.name, best.mean, best.column.better, label)


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
