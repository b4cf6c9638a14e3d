"""Status of a run: one small file that says what its newest command does, or did.

``raypipe ls`` and ``raypipe watch`` read nothing else, whatever the size of the ledger. The file is
a report, not a record: nothing is computed from it, and a run without it is whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from functools import partial
from typing import Any

from raypipe.redaction import printable
from raypipe.storage.run_directory import RunDirectory

#: bytes above which a file is not one that raypipe wrote
_LARGEST = 4 * 2**20
_KINDS: Mapping[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
#: seconds above which a duration is not one, and years between which a time is one
_LONGEST_S, _YEARS = 1e11, range(1970, 9000)
_NUMBERS = ("done", "total", "seconds")
_shown = partial(printable, keep="\n")


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
