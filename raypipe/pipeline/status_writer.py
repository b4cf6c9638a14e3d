"""Writer of a run's status: what the display shows, to be read from elsewhere."""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from raypipe.provenance import now
from raypipe.redaction import without_credentials
from raypipe.storage import run_status
from raypipe.storage.lock import LostLeaseError
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.run_status import RunStatus

log = logging.getLogger(__name__)

#: seconds between writings: to a disk, and to an object store, where each one costs money
_PERIOD_S, _REMOTE_PERIOD_S = 2.0, 10.0
#: seconds for which the end of a command waits for a writing in progress
_PATIENCE_S = 10.0
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
