"""The durable record of a run: what is finished, and its results.

The ledger is a log of rows ``(table, key, row)``; the newest row of a key counts. One writer
appends, each append is on disk before it returns. The results tables are derived from it.
On a local file system it is one file that grows; on object storage, where nothing can be
appended to, it is a few segments that are merged before they become many.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import RLock
from typing import Any

from raypipe.paths import RunDirectory

Row = dict[str, Any]
_MAX_SEGMENTS = 32

log = logging.getLogger(__name__)


class Ledger:
    """The rows of a run, in memory and on disk.

    Opening reads what is there: a half-written last line, left by a killed process, is cut
    off; a damaged line inside is reported and its unit counts as not done. With
    ``writable=False`` nothing on disk is touched. ``before_writing`` raises where another
    command has become the writer.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        writable: bool = True,
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._before_writing = run, before_writing
        self._tables: dict[str, dict[str, Row]] = {}
        self._lock = RLock()
        self._segments: list[str] = []
        self._writable = writable
        for name in run.list(run.ledger):
            if name.endswith(".jsonl"):
                self._read(name)

    def put(self, table: str, rows: Mapping[str, Row]) -> None:
        """Record rows by their keys, durably, replacing earlier rows of the same keys."""
        if not rows:
            return
        with self._lock:
            self._append(_encode(table, rows))
            self._tables.setdefault(table, {}).update(rows)

    def remove(self, table: str, keys: Iterable[str]) -> None:
        """Take rows back, durably; a missing one is fine."""
        with self._lock:
            known = [key for key in keys if key in self._tables.get(table, {})]
            self._append(_encode(table, dict.fromkeys(known)))
            for key in known:
                del self._tables[table][key]

    def get(self, table: str, key: str) -> Row | None:
        """The newest row of a key."""
        with self._lock:
            return self._tables.get(table, {}).get(key)

    def rows(self, table: str) -> list[Row]:
        """All rows of a table, in the order in which their keys first appeared."""
        with self._lock:
            return list(self._tables.get(table, {}).values())

    def items(self, table: str) -> list[tuple[str, Row]]:
        """All keys of a table with their rows."""
        with self._lock:
            return list(self._tables.get(table, {}).items())

    def tables(self) -> list[str]:
        """The names of the tables that have rows."""
        with self._lock:
            return list(self._tables)

    def _append(self, content: bytes) -> None:
        if not self._writable:
            raise RuntimeError("this ledger was opened for reading")
        if not content:
            return
        self._before_writing()
        if self._run.is_local:
            self._append_local(content)
        else:
            self._append_segment(content)

    def _append_local(self, content: bytes) -> None:
        if not self._segments:
            self._segments.append(_segment(0))
        path = Path(self._run.ledger, self._segments[-1])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as stream:
            before = stream.tell()
            try:
                rest = memoryview(content)
                while rest:  # an unbuffered write may be short
                    rest = rest[stream.write(rest) :]
                os.fsync(stream.fileno())
            except BaseException:  # a full disk, an interrupt: what follows starts on a new line
                stream.truncate(before)
                raise

    def _append_segment(self, content: bytes) -> None:
        last = self._segments[-1].partition(".")[0] if self._segments else "-1"
        name = _segment(int(last) + 1)
        merge = len(self._segments) >= _MAX_SEGMENTS
        if merge:
            earlier = (_encode(table, rows) for table, rows in self._tables.items())
            content = b"".join([*earlier, content])
        self._run.write(f"{self._run.ledger}/{name}", content)
        if merge:  # the merged segment is complete: what it replaces may go
            for old in self._segments:
                self._run.delete(f"{self._run.ledger}/{old}")
            self._segments = []
        self._segments.append(name)

    def _read(self, name: str) -> None:
        path = f"{self._run.ledger}/{name}"
        content = self._run.read(path)
        whole, _, torn = content.rpartition(b"\n")
        if torn:
            log.warning("%s: cut off a half-written last line (%d bytes)", path, len(torn))
            if self._writable and self._run.is_local:
                os.truncate(path, len(content) - len(torn))
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                entry = json.loads(line)
                rows = self._tables.setdefault(entry["table"], {})
                if entry["row"] is None:
                    rows.pop(entry["key"], None)
                else:
                    rows[entry["key"]] = dict(entry["row"])
            except (ValueError, KeyError, TypeError):
                log.warning("%s line %d is damaged; its unit will be run again", path, number)
        self._segments.append(name)


def _segment(number: int) -> str:
    return f"{number:08d}.jsonl"


def _encode(table: str, rows: Mapping[str, Row | None]) -> bytes:
    lines = (json.dumps({"table": table, "key": key, "row": row}) for key, row in rows.items())
    return "".join(f"{line}\n" for line in lines).encode()
