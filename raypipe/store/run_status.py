"""Status of a run: one small file that says what its newest command does, or did.

``raypipe ls`` and ``raypipe watch`` read nothing else, whatever the size of the ledger. The file is
a report, not a record: nothing is computed from it, and a run without it is whole.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any

from raypipe.errors import LostLeaseError
from raypipe.provenance import now
from raypipe.redaction import printable, without_credentials
from raypipe.store import run_status
from raypipe.store.run_directory import RunDirectory

#: bytes above which a file is not one that raypipe wrote
_LARGEST = 4 * 2**20
_KINDS: Mapping[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
#: seconds above which a duration is not one, and years between which a time is one
_LONGEST_S, _YEARS = 1e11, range(1970, 9000)
_NUMBERS = ("done", "total", "seconds")
_shown = partial(printable, keep="\n")
log = logging.getLogger(__name__)
#: seconds between writings: to a disk, and to an object store, where each one costs money
_PERIOD_S, _REMOTE_PERIOD_S = 2.0, 10.0
#: seconds for which the end of a command waits for a writing in progress
_PATIENCE_S = 10.0
_LONGEST_MESSAGE = 2000


@dataclass(frozen=True)
class KeyResult:
    """The result that stands for a run: the best value of a table's first measure.

    ``label`` is what tells its row from the others, such as the method; ``better`` is ``lower`` or
    ``higher``.
    """

    table: str
    column: str
    value: float
    better: str
    label: str = ""

    @property
    def text(self) -> str:
        """The result in words: ``accuracy 0.931 (transformer)``."""
        return f"{self.column} {self.value:.4g}" + (f" ({self.label})" if self.label else "")


@dataclass(frozen=True)
class RunStatus:
    """Status of the newest command of a run directory.

    Times are ISO 8601, UTC. ``status`` is running, succeeded, failed or interrupted; a killed
    command leaves ``running``. ``earlier_s`` are the seconds of earlier commands. ``running`` has a
    mapping for each running stage (stage, done, total, seconds, note), ``messages`` the last lines
    that the command printed, each with its number.
    """

    experiment: str
    run_id: str
    command: str
    status: str
    first_started_at: str
    started_at: str
    updated_at: str
    earlier_s: float = 0.0
    commands: int = 1
    message: str = ""
    profile: str = ""
    code: str = ""
    host: str = ""
    pid: int = 0
    period_s: float = 0.0
    stages: int = 0
    ended: int = 0
    left: str = ""
    use: str = ""
    running: tuple[Mapping[str, Any], ...] = ()
    messages: tuple[tuple[int, str], ...] = ()
    key_result: KeyResult | None = field(default=None)

    @property
    def duration_s(self) -> float:
        """Seconds of all commands, up to the last writing."""
        start, end = map(datetime.fromisoformat, (self.started_at, self.updated_at))
        return self.earlier_s + max(0.0, (end - start).total_seconds())

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def parse(cls, content: bytes) -> RunStatus | None:
        """Return the status in the content of a file; None if it is damaged."""
        try:
            return cls._checked(json.loads(content))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    @classmethod
    def _checked(cls, found: Mapping[str, Any]) -> RunStatus:
        """Return the status in plain values. Raises ValueError, TypeError, KeyError."""
        known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
        if (key := known.get("key_result")) is not None:
            known["key_result"] = KeyResult(**_of_kinds(KeyResult, key))
        known["running"] = tuple(_running(row) for row in known.get("running", ()))
        known["messages"] = tuple((int(n), _shown(str(t))) for n, t in known.get("messages", ()))
        status = cls(**_of_kinds(cls, known))
        for time in (status.first_started_at, status.started_at, status.updated_at):
            at = datetime.fromisoformat(time)
            if at.tzinfo is None or at.year not in _YEARS:
                raise ValueError(time)
        for seconds in (status.earlier_s, status.period_s):
            if not 0 <= seconds <= _LONGEST_S:
                raise ValueError(seconds)
        return status


def read(run: RunDirectory) -> RunStatus | None:
    """Return the status of a run; None if it has none, or a damaged one.

    Raises:
        OSError: it cannot be read.

    """
    try:
        content = run.read(run.status)
    except FileNotFoundError:
        return None
    return RunStatus.parse(content) if len(content) <= _LARGEST else None


def _of_kinds(kind: type[KeyResult | RunStatus], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values whose types are those of the fields; texts as a terminal may show them."""
    plain = dict(values)
    for each in fields(kind):
        kinds = _KINDS.get(str(each.type))
        if kinds and each.name in plain and not isinstance(plain[each.name], kinds):
            raise TypeError(each.name)
    return {name: _shown(v) if isinstance(v, str) else v for name, v in plain.items()}


def _running(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a running stage. Raises ValueError, TypeError, KeyError."""
    numbers = {name: row.get(name) or 0 for name in _NUMBERS}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError(name)
    return {"stage": _shown(str(row["stage"])), **numbers, "note": _shown(str(row.get("note", "")))}


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
