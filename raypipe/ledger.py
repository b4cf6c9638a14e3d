"""The durable record of a run: what is finished, and its results.

The ledger is a log of rows ``(table, key, row)``; the newest row of a key counts. One writer
appends, each append is on disk before it returns. The results tables are derived from it.
On a local file system it is one file that grows; on object storage, where nothing can be
appended to, it is a few segments that are merged before they become many. Each line ends with the
CRC-32 of what is before it.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import RLock
from typing import Any

from raypipe.paths import RunDirectory

Row = dict[str, Any]
_MAX_SEGMENTS = 32
_CRC = b', "crc": '

#: the table of what is finished
_UNITS = "units"

log = logging.getLogger(__name__)


class Ledger:
    """The rows of a run, in memory and on disk.

    Opening reads what is there: a half-written last line, left by a killed process, is cut
    off. A damaged line inside is reported; since nothing tells whose result it was, every unit
    counts as not done then, and is done again from what is stored of it. With ``writable=False``
    nothing on disk is touched. ``before_writing`` raises where another command has become the
    writer.
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
        whole = [self._read(name) for name in run.list(run.ledger) if name.endswith(".jsonl")]
        if not all(whole):
            self._tables.pop(_UNITS, None)
            if writable:
                self._rewrite()

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
        if len(self._segments) >= _MAX_SEGMENTS:
            self._rewrite(content)
            return
        name = self._next_segment()
        self._run.write(f"{self._run.ledger}/{name}", content)
        self._segments.append(name)

    def _rewrite(self, content: bytes = b"") -> None:
        """Put all rows, and what is new, into one segment, then remove those it replaces."""
        self._before_writing()
        name = self._next_segment()
        earlier = (_encode(table, rows) for table, rows in self._tables.items())
        self._run.write(f"{self._run.ledger}/{name}", b"".join([*earlier, content]))
        for old in self._segments:
            self._run.delete(f"{self._run.ledger}/{old}")
        self._segments = [name]

    def _next_segment(self) -> str:
        return _segment(int(self._segments[-1].partition(".")[0]) + 1 if self._segments else 0)

    def _read(self, name: str) -> bool:
        """Take the rows of a segment; whether all its lines are whole."""
        path = f"{self._run.ledger}/{name}"
        content = self._run.read(path)
        whole, _, torn = content.rpartition(b"\n")
        if torn:
            log.warning("%s: cut off a half-written last line (%d bytes)", path, len(torn))
            if self._writable and self._run.is_local:
                os.truncate(path, len(content) - len(torn))
        damaged = False
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                table, key, row = _decode(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged = True
                log.warning("%s line %d is damaged; units will be run again", path, number)
                continue
            rows = self._tables.setdefault(table, {})
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
        self._segments.append(name)
        return not damaged


def _segment(number: int) -> str:
    return f"{number:08d}.jsonl"


def _encode(table: str, rows: Mapping[str, Row | None]) -> bytes:
    lines = []
    for key, row in rows.items():
        line = json.dumps({"table": table, "key": key, "row": row})[:-1]
        lines.append(f"{line}{_CRC.decode()}{zlib.crc32(line.encode())}}}\n")
    return "".join(lines).encode()


def _decode(line: bytes) -> tuple[str, str, Row | None]:
    """Table, key and row of a line. Raises ValueError, KeyError, TypeError, RecursionError."""
    content, mark, checksum = line.rpartition(_CRC)
    if mark and int(checksum.removesuffix(b"}")) != zlib.crc32(content):
        raise ValueError("another checksum")
    entry = json.loads(line)  # lines of versions before the checksum are taken as they are
    table, key, row = entry["table"], entry["key"], entry["row"]
    if not (isinstance(table, str) and isinstance(key, str) and isinstance(row, dict | None)):
        raise TypeError("of another form")
    return table, key, row
