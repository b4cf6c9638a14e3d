"""Status of a run: one small file that says what its newest command does, or did.

``raypipe ls`` and ``raypipe watch`` read nothing else, whatever the size of the ledger. The file is
a report, not a record: nothing is computed from it, and a run without it is whole.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from raypipe.errors import LostLeaseError
from raypipe.provenance import now
from raypipe.redaction import printable, without_credentials
from raypipe.store.run_directory import RunDirectory

#: years between which a time is one
_YEARS = range(1970, 9000)
log = logging.getLogger(__name__)
#: seconds between writings: to a disk, and to an object store, where each one costs money
_PERIOD_S, _REMOTE_PERIOD_S = 2.0, 10.0
_LONGEST_MESSAGE = 2000


def _checked_time(text: str) -> str:
    """Return a time in ISO 8601 with a time zone. Raises ValueError."""
    at = datetime.fromisoformat(text)
    if at.tzinfo is None or at.year not in _YEARS:
        raise ValueError(text)
    return text


#: a text as a terminal may show it
_Text = Annotated[
    str, BeforeValidator(lambda text: printable(text, keep="\n") if isinstance(text, str) else text)
]
_Time = Annotated[str, AfterValidator(_checked_time)]
_Seconds = Annotated[float, Field(ge=0, le=1e11)]
_Number = Annotated[int | float, Field(allow_inf_nan=False)]


class RunningStage(TypedDict, total=False):
    """A running stage of a status."""

    stage: _Text
    done: _Number
    total: _Number
    seconds: _Number
    note: _Text


@dataclass(frozen=True)
class RunStatus:
    """Status of the newest command of a run directory.

    Times are ISO 8601, UTC. ``status`` is running, succeeded, failed or interrupted; a killed
    command leaves ``running``. ``earlier_s`` are the seconds of earlier commands. ``messages`` are
    the last lines that the command printed, each with its number. ``result`` stands for the run.
    ``jobs`` are the living commands that share it.
    """

    experiment: _Text
    run_id: _Text
    command: _Text
    status: _Text
    first_started_at: _Time
    started_at: _Time
    updated_at: _Time
    earlier_s: _Seconds = 0.0
    commands: int = 1
    message: _Text = ""
    profile: _Text = ""
    code: _Text = ""
    host: _Text = ""
    pid: int = 0
    period_s: _Seconds = 0.0
    stages: int = 0
    done: int = 0
    jobs: int = 0
    left: _Text = ""
    use: _Text = ""
    running: tuple[RunningStage, ...] = ()
    messages: tuple[tuple[int, _Text], ...] = ()
    result: _Text = ""

    @property
    def duration_s(self) -> float:
        """Seconds of all commands, up to the last writing."""
        start, end = map(datetime.fromisoformat, (self.started_at, self.updated_at))
        return self.earlier_s + max(0.0, (end - start).total_seconds())

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> RunStatus | None:
        """Return the status in the content of a file; None if it is damaged."""
        with suppress(ValueError, RecursionError):
            return TypeAdapter(cls).validate_python(json.loads(content))
        return None


def read(run: RunDirectory) -> RunStatus | None:
    """Return the status of a run; None if it has none, or a damaged one.

    Raises:
        OSError: it cannot be read.

    """
    with suppress(FileNotFoundError):
        return RunStatus.parse(run.read(run.status))
    return None


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
        self.result = status.result
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="status", daemon=True)

    def __enter__(self) -> StatusWriter:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._status.status == "running" or isinstance(error, Exception):
            interrupted = isinstance(error, KeyboardInterrupt)
            self.end("interrupted" if interrupted else "failed", str(error or ""))

    def end(self, status: str, message: str = "") -> None:
        """Write the outcome of the command."""
        self._over.set()
        self._thread.join()  # a writing in progress would come after this one
        message = without_credentials(message)[:_LONGEST_MESSAGE]
        self._status = replace(self._status, status=status, message=message)
        self._write(durable=True)

    def _tick(self) -> None:
        self._write()
        while not self._over.wait(self._status.period_s):
            self._write()

    def _write(self, *, durable: bool = False) -> None:
        """Write the status, unless another command does; that one may end before this one."""
        try:
            self._before()
            found = {**self._snapshot(), "result": self.result, "updated_at": now()}
            if self._status.status != "running":
                found |= {"jobs": 0, "left": "", "use": "", "running": ()}
            self._status = replace(self._status, **found)
            content = self._status.to_bytes()
            self._run_dir.write(self._run_dir.status, content, durable=durable)
        except LostLeaseError:
            pass
        except Exception as error:
            log.warning("%s: the status was not written: %s", self._run_dir.shown, error)


def first_status(
    run_dir: RunDirectory, experiment: str, run_id: str, command: str, profile: str, code: str
) -> RunStatus:
    """Return the status at the start of a command; it goes on with that of the earlier ones."""
    at = now()
    fields: dict[str, Any] = {"profile": profile, "code": code, "first_started_at": at}
    with suppress(OSError):
        earlier = read(run_dir)
        if earlier is not None and earlier.run_id == run_id:
            fields |= {
                "first_started_at": earlier.first_started_at,
                "earlier_s": earlier.duration_s,
                "commands": earlier.commands + 1,
                "result": earlier.result,
            }
    fields |= {"host": platform.node(), "pid": os.getpid(), "started_at": at, "updated_at": at}
    return RunStatus(experiment, run_id, command, "running", **fields)
