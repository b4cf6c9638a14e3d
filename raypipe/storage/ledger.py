"""Ledger: the durable record of finished units and their results.

The ledger is a log of rows ``(table, key, row)``; the newest row of a key counts. One writer
appends, each append is on disk before it returns. The results tables are derived from it.
On a local file system it is one file that grows; on object storage, where nothing can be
appended to, it is a few segments that are merged before they become many. Each line ends with its
number in the file and the CRC-32 of all that, which tells damaged, missing and misplaced lines.
No two writers name a segment alike, and each is whole by itself: one that arrives late, of a writer
that another replaced, only adds its rows.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from sys import intern
from threading import RLock
from typing import Any

from raypipe.errors import ConfigError
from raypipe.storage.run_directory import RunDirectory, make_folder, sync_folder

Row = dict[str, Any]
#: table, key, and the row, None where it is taken back
_Entry = tuple[str, str, Row | None]
_MAX_SEGMENTS = 32
#: a reader begins again so often, after a pause, where segments were merged meanwhile
_READINGS, _PAUSE_S = 6, 0.5
_CRC = b', "crc": '

#: the table of finished units
_UNITS = "units"
#: the runner's own records, which are not results: they carry no stamp and become no table
INTERNAL = frozenset({_UNITS, "runs", "identities", "code"})

log = logging.getLogger(__name__)


class Ledger:
    """The rows of a run, in memory and on disk.

    Opening reads what is there: a half-written last line, left by a killed process, is cut
    off. A damaged or missing line inside is reported; since nothing tells whose result it was,
    every unit counts as not done then, and is done again from what is stored of it. With
    ``writable=False`` nothing on disk is touched. ``before_writing`` raises where another command
    has become the writer. ``stamp`` holds columns that every row written from now on gets.

    Raises:
        ConfigError: what is there cannot be read, or is merged by its writer again and again.

    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        writable: bool = True,
        before_writing: Callable[[], None] = lambda: None,
        stamp: Row | None = None,
    ) -> None:
        self._run, self._before_writing = run, before_writing
        self._stamp = stamp or {}
        self._tables: dict[str, dict[str, Row]] = {}
        self._lock = RLock()
        self._segments: list[str] = []
        self._lines: int | None = 0  # of the last segment; None where an append was interrupted
        self._writable = writable
        self._token = secrets.token_hex(4)
        if not self._read_all():
            self._tables.pop(_UNITS, None)
            if writable:
                self._rewrite()

    def put(self, table: str, rows: Mapping[str, Row]) -> None:
        """Record rows by their keys, durably, replacing earlier rows of the same keys."""
        self.put_tables({table: rows})

    def put_tables(self, tables: Mapping[str, Mapping[str, Row]]) -> None:
        """Record rows of several tables with one wait for the disk."""
        if self._stamp:
            tables = {
                table: {key: {**row, **self._stamp} for key, row in rows.items()}
                for table, rows in tables.items()
                if table not in INTERNAL
            } | {table: rows for table, rows in tables.items() if table in INTERNAL}
        with self._lock:
            self._append(
                [(table, key, row) for table, rows in tables.items() for key, row in rows.items()]
            )
            for table, rows in tables.items():
                if rows:
                    self._tables.setdefault(table, {}).update(rows)

    def remove(self, table: str, keys: Iterable[str]) -> None:
        """Take rows back, durably; a missing one is fine."""
        with self._lock:
            known = [key for key in keys if key in self._tables.get(table, {})]
            self._append([(table, key, None) for key in known])
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

    def count(self, table: str) -> int:
        """How many rows a table has."""
        with self._lock:
            return len(self._tables.get(table, {}))

    def tables(self) -> list[str]:
        """The names of the tables that have rows."""
        with self._lock:
            return list(self._tables)

    def _append(self, entries: Sequence[_Entry]) -> None:
        if not self._writable:
            raise RuntimeError("this ledger was opened for reading")
        if not entries:
            return
        self._before_writing()
        if self._run.is_local:
            self._append_local(entries)
        elif len(self._segments) < _MAX_SEGMENTS:
            self._write_segment(entries)
        else:
            self._rewrite(entries)

    def _append_local(self, entries: Sequence[_Entry]) -> None:
        if not self._segments:
            make_folder(self._run.ledger)
            Path(self._run.ledger, _segment(0)).touch()
            sync_folder(self._run.ledger)
            self._segments.append(_segment(0))
        path = Path(self._run.ledger, self._segments[-1])
        lines, self._lines = self._lines, None
        if lines is None:
            lines = _count(path)
        content = _encode(entries, lines)
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
        self._lines = lines + len(entries)

    def _write_segment(self, entries: Sequence[_Entry]) -> None:
        last = self._segments[-1].partition(".")[0].partition("-")[0] if self._segments else "-1"
        name = _segment(int(last) + 1, "" if self._run.is_local else f"-{self._token}")
        content = _encode(entries, 0)
        self._segments.append(name)  # not used again, even if it is unknown whether it was written
        self._run.write(f"{self._run.ledger}/{name}", content)
        self._lines = len(entries)

    def _rewrite(self, entries: Sequence[_Entry] = ()) -> None:
        """Put all rows, and what is new, into one segment, then remove those it replaces."""
        earlier = [(t, key, row) for t, rows in self._tables.items() for key, row in rows.items()]
        self._write_segment([*earlier, *entries])
        *replaced, new = self._segments
        for old in replaced:
            self._run.delete(f"{self._run.ledger}/{old}")
        self._segments = [new]

    def _read_all(self) -> bool:
        """Take the rows of all segments; whether all their lines are whole."""
        for _ in range(_READINGS):
            self._tables, self._segments = {}, []
            try:
                names = [n for n in self._run.list(self._run.ledger) if n.endswith(".jsonl")]
                whole = [self._read(name) for name in names]
                return all(whole)
            except FileNotFoundError:  # the writer has merged it since it was listed
                time.sleep(_PAUSE_S)
            except OSError as error:
                raise ConfigError(
                    f"--run-dir {self._run.shown}: its ledger cannot be read: {error}"
                ) from error
        raise ConfigError(
            f"--run-dir {self._run.shown}: its ledger changes while it is read: another raypipe "
            "command is writing it; try again"
        )

    def _read(self, name: str) -> bool:
        """Take the rows of a segment; whether all its lines are whole."""
        path = f"{self._run.ledger}/{name}"
        content = self._run.read(path)
        damaged, self._lines = False, 0
        for number, line in enumerate(BytesIO(content), start=1):
            if not line.endswith(b"\n"):
                log.warning("%s: cut off a half-written last line (%d bytes)", path, len(line))
                if self._writable and self._run.is_local:
                    os.truncate(path, len(content) - len(line))
                break
            self._lines += 1
            try:
                table, key, row, place = _decode(line.removesuffix(b"\n"))
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged = True
                log.warning("%s line %d is damaged; units will be run again", path, number)
                continue
            if place != self._lines:
                damaged = True
                log.warning(
                    "%s: lines before line %d are missing; units will be run again", path, number
                )
                self._lines = place
            rows = self._tables.setdefault(table, {})
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
        self._segments.append(name)
        return not damaged


def _with_shared_names(pairs: list[tuple[str, Any]]) -> Row:
    """A JSON object; the names in 10^5 rows are the same strings, not as many equal ones."""
    return {intern(name): value for name, value in pairs}


def _segment(number: int, writer: str = "") -> str:
    return f"{number:08d}{writer}.jsonl"


def _count(path: Path) -> int:
    """How many lines a segment has; a half-written last one is cut off."""
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)
    return content.count(b"\n")


def _encode(entries: Iterable[_Entry], before: int) -> bytes:
    """Lines of a segment that has so many before them."""
    lines = []
    for number, (table, key, row) in enumerate(entries, start=before + 1):
        content = {"table": table, "key": key, "row": row, "line": number}
        line = json.dumps(content).removesuffix("}").encode()
        lines.append(b"%s%s%d}\n" % (line, _CRC, zlib.crc32(line)))
    return b"".join(lines)


def _decode(line: bytes) -> tuple[str, str, Row | None, int]:
    """Table, key, row and number of a line.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: it is damaged.

    """
    content = line.rpartition(_CRC)[0]
    if line != b"%s%s%d}" % (content, _CRC, zlib.crc32(content)):
        raise ValueError("another checksum")
    entry = json.loads(line, object_pairs_hook=_with_shared_names)
    table, key, row, number = entry["table"], entry["key"], entry["row"], entry["line"]
    kinds = ((table, str), (key, str), (row, dict | None), (number, int))
    if not all(isinstance(value, kind) for value, kind in kinds):
        raise TypeError("of another form")
    return table, key, row, number
