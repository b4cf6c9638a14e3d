"""Metrics file of a script: read while the script writes it, in the formats that are common."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: a record as the script wrote it: names and plain values
Record = dict[str, Any]

#: share of the time that reading may take
_SHARE = 0.1
_POLL_S = 0.05
#: bytes before the read position that must be the same when reading goes on
_OVERLAP = 64


class Batch(NamedTuple):
    """Records that were read together; ``restarted``: the file is another one, or was truncated."""

    records: list[Record]
    restarted: bool = False


class MetricsFile:
    """Reader of the newest file of a pattern, which may appear late, grow, or be truncated.

    JSON lines and CSV are read as they grow, up to the last whole line. A ``.json`` file is a list
    of records, or a document with one under ``log_history`` (``trainer_state.json`` of Hugging
    Face's Trainer); it is read again when it changes.
    """

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._path: Path | None = None
        self._state: tuple[int, int, int] | None = None
        self._next_look = 0.0
        self._begin()

    def read(self, *, last: bool = False) -> Batch:
        """Return the records since the last call; with ``last`` also an unfinished last line."""
        started = time.monotonic()
        if started < self._next_look and not last:
            return Batch([])
        batch = self._read(last=last)
        took = time.monotonic() - started
        self._next_look = started + took + max(_POLL_S, took / _SHARE)
        return batch

    def files(self) -> list[Path]:
        """Return the files of the pattern, the newest last."""
        if any(sign in self._pattern for sign in "*?["):
            found = [path for path in self._folder.glob(self._pattern) if path.is_file()]
        else:
            found = [path for path in [self._folder / self._pattern] if path.is_file()]
        return sorted(found, key=_changed_at)

    def _read(self, *, last: bool) -> Batch:
        try:
            path = self.files()[-1]
            stat = path.stat()
        except (IndexError, OSError):
            return Batch([])
        state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if path == self._path and state == self._state and not last:
            return Batch([])
        other = path != self._path or (self._state is not None and self._state[0] != state[0])
        had = self._path is not None
        self._path, self._state = path, state
        if path.suffix == ".json":
            return _document(path, restarted=had)
        if other or not self._goes_on(path, stat.st_size):
            self._begin()
            return Batch(list(self._lines(path, last=last)), restarted=had)
        return Batch(list(self._lines(path, last=last)))

    def _begin(self) -> None:
        self._position, self._tail = 0, b""
        self._names: list[str] | None = None

    def _goes_on(self, path: Path, size: int) -> bool:
        """Whether the file still begins with what was read of it."""
        if size < self._position:
            return False
        with path.open("rb") as stream:
            stream.seek(self._position - len(self._tail))
            return stream.read(len(self._tail)) == self._tail

    def _lines(self, path: Path, *, last: bool) -> Iterator[Record]:
        with path.open("rb") as stream:
            stream.seek(self._position)
            content = stream.read()
        end = len(content) if last else content.rfind(b"\n") + 1
        self._position += end
        self._tail = (self._tail + content[:end])[-_OVERLAP:]
        for line in content[:end].decode(errors="replace").splitlines():
            record = self._csv(line) if path.suffix == ".csv" else record_of(line)
            if record:
                yield record

    def _csv(self, line: str) -> Record | None:
        if not line.strip():
            return None
        cells = next(csv.reader([line]))
        if self._names is None or cells == self._names:
            self._names = [cell.strip() for cell in cells]
            return None
        return dict(zip(self._names, cells, strict=False))


def record_of(line: str) -> Record | None:
    """Return the record of a line of JSON; None if it has none."""
    text = line.strip()
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by their names; of nested ones as ``outer_inner``.

    Text is a number if it can be read as one. Truth values are not numbers. Values may be NaN.
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{name}_{inner}": each for inner, each in numbers(value).items()}
        elif isinstance(value, str):
            try:
                found[str(name)] = float(value)
            except ValueError:
                continue
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[str(name)] = _float(value)
    return found


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _document(path: Path, *, restarted: bool) -> Batch:
    """Return the records of a JSON document; none while it is incomplete."""
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, OSError):
        return Batch([])
    if isinstance(content, Mapping):
        history = content.get("log_history")
        content = history if isinstance(history, list) else [content]
    found = content if isinstance(content, list) else []
    return Batch([record for record in found if isinstance(record, dict)], restarted)


def _changed_at(path: Path) -> tuple[int, str]:
    try:
        return path.stat().st_mtime_ns, str(path)
    except OSError:  # deleted meanwhile
        return 0, str(path)
