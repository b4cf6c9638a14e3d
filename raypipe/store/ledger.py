"""Ledger: the durable record of finished units and their results.

The ledger is a log of rows ``(table, key, row)``; the newest row of a key counts. One writer
appends, and each append is on disk before it returns. The results tables derive from it. On a local
file system the ledger is one growing file. Object storage cannot append, so there it is a few
segments, which are merged before they become many. Each line ends with its number in the file and
the CRC-32 of the line, which reveals damaged, missing and misplaced lines. No two writers use the
same segment name, and each segment is complete: if a replaced writer's segment arrives late, it
only adds rows.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from sys import intern
from threading import RLock
from typing import Any

from raypipe.errors import ConfigError
from raypipe.store.run_directory import BASE, RunDirectory, variant_name

Row = dict[str, Any]
#: table, key, and the row; None if it was removed
_Entry = tuple[str, str, Row | None]
_MAX_SEGMENTS = 32
#: attempts of a reader, with pauses, if segments are merged while it reads
_READINGS, _PAUSE_S = 6, 0.5
_CRC = b', "crc": '

#: the table of finished units; such a row may have the checksums of the rows that are its result,
#: which have the unit's key, by table
_UNITS, RESULTS = "units", "results"
#: the table of what is recorded about the run itself
_RUNS = "runs"
#: columns that are added to a row on its way to the ledger
_ADDED = ("command_id", "variant")
#: suffix of a segment with damaged lines that was replaced, and the damaged lines that are named
REPLACED, _MOST_NAMED = ".damaged", 3
#: the runner's own records: they are not results, have no stamp and become no table
INTERNAL = frozenset({_UNITS, _RUNS, "identities", "code"})

log = logging.getLogger(__name__)


class Ledger:
    """The rows of a run, in memory and on disk.

    Opening reads the stored rows. An incomplete last line, left by a killed process, is dropped;
    a reader reports it. After a damaged or missing line inside, only units count as finished whose
    row names their results by checksums that match; the others are computed again from their
    stored parts. A writer then keeps the damaged segment next to the new one. With
    ``writable=False`` nothing on disk changes. ``before_writing`` raises if another command has
    become the writer. ``stamp`` holds columns that every new row gets; a row that is written again
    keeps its own.

    Attributes:
        damage: which lines are damaged and how many units run again, in words; empty if none is.
        changes: the number of changes since it was opened; the tables are older where it differs.

    Raises:
        ConfigError: the stored rows cannot be read, or their writer keeps merging them.

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
        self.changes = 0
        self._segments: list[str] = []
        self._end = (0, 0)  # the bytes and the lines of the last segment
        self._writable = writable
        self._token = secrets.token_hex(4)
        self._damaged: dict[str, list[str]] = {}  # by segment, its damaged lines in words
        self._read_all()
        self.damage = self._keep_intact_units() if self._damaged else ""
        if self.damage and writable:
            self._rewrite()

    @classmethod
    def to_read(cls, run: RunDirectory) -> Ledger:
        """Open a ledger without writing; a damaged one is a warning. Raises ConfigError."""
        ledger = cls(run, writable=False)
        if ledger.damage:
            log.warning("%s: the ledger is damaged: %s", run.shown, ledger.damage)
        return ledger

    @property
    def version(self) -> tuple[Any, ...]:
        """Equal for two readings between which no command wrote."""
        return *self._segments, self._end

    def put(self, table: str, rows: Mapping[str, Row]) -> None:
        """Record rows by key, durably; they replace earlier rows with the same keys."""
        self.put_tables({table: rows})

    def put_tables(self, tables: Mapping[str, Mapping[str, Row]]) -> None:
        """Record rows of several tables with one disk sync."""
        tables = {
            table: {
                key: row if table in INTERNAL else {**self._stamp, **row}
                for key, row in rows.items()
            }
            for table, rows in tables.items()
        }
        entries = [(table, key, row) for table, rows in tables.items() for key, row in rows.items()]
        with self._lock:
            self._append(entries)
            self.changes += 1
            for table, rows in tables.items():
                if rows:
                    self._tables.setdefault(table, {}).update(rows)

    def remove(self, table: str, keys: Iterable[str]) -> None:
        """Remove rows durably; missing ones are ignored."""
        with self._lock:
            known = [key for key in keys if key in self._tables.get(table, {})]
            self._append([(table, key, None) for key in known])
            self.changes += 1
            for key in known:
                del self._tables[table][key]

    def get(self, table: str, key: str) -> Row | None:
        """Return the newest row of a key, or None."""
        with self._lock:
            return self._tables.get(table, {}).get(key)

    def rows(self, table: str) -> list[Row]:
        """Return all rows of a table, in the order in which their keys first appeared."""
        with self._lock:
            return list(self._tables.get(table, {}).values())

    def items(self, table: str) -> list[tuple[str, Row]]:
        """Return all keys of a table with their rows."""
        with self._lock:
            return list(self._tables.get(table, {}).items())

    def tables(self) -> list[str]:
        """Return the names of the tables that have rows."""
        with self._lock:
            return list(self._tables)

    def _append(self, entries: Sequence[_Entry]) -> None:
        if not self._writable:
            raise RuntimeError("this ledger was opened for reading")
        if not entries:
            return
        self._before_writing()
        if self._run.is_local and self._segments:
            self._append_local(entries)
        elif len(self._segments) < _MAX_SEGMENTS:
            self._write_segment(entries)
        else:
            self._rewrite(entries)

    def _append_local(self, entries: Sequence[_Entry]) -> None:
        size, lines = self._end
        content = encode(entries, lines)
        with Path(self._run.ledger, self._segments[-1]).open("ab") as stream:
            stream.truncate(size)  # what an append left that was interrupted, or had no room
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        self._end = size + len(content), lines + len(entries)

    def _write_segment(self, entries: Sequence[_Entry]) -> None:
        last = self._segments[-1].partition(".")[0].partition("-")[0] if self._segments else "-1"
        writer = "" if self._run.is_local else f"-{self._token}"
        name = f"{int(last) + 1:08d}{writer}.jsonl"
        content = encode(entries, 0)
        self._segments.append(name)  # never reused, since it may have been written
        self._run.write(f"{self._run.ledger}/{name}", content)
        self._end = len(content), len(entries)

    def _rewrite(self, entries: Sequence[_Entry] = ()) -> None:
        """Write all rows and the new ones to one segment, then remove the segments it replaces."""
        earlier = [(t, key, row) for t, rows in self._tables.items() for key, row in rows.items()]
        self._write_segment([*earlier, *entries])
        *replaced, new = self._segments
        for old in replaced:
            path = f"{self._run.ledger}/{old}"
            if old in self._damaged:
                self._run.fs.move(path, f"{path}{REPLACED}")
            else:
                self._run.delete(path)
        self._segments, self._damaged = [new], {}

    def _keep_intact_units(self) -> str:
        """Keep the units whose results match their checksums; return a message about the damage."""
        found = self._tables.get(_UNITS, {})
        named = {table for unit in found.values() for table in unit.get(RESULTS, ())}
        known = {*found, *(key for table in named for key in self._tables.get(table, ()))}
        intact = {key: unit for key, unit in found.items() if self._is_intact(key, unit)}
        self._tables[_UNITS] = intact
        places = [f"{line} of {name}" for name, lines in self._damaged.items() for line in lines]
        more = f" and {len(places) - _MOST_NAMED} more" * (len(places) > _MOST_NAMED)
        again = f"{len(known) - len(intact)} of {len(known)} units run again"
        return f"{', '.join(places[:_MOST_NAMED])}{more}; {again}; the others are intact"

    def _is_intact(self, key: str, unit: Row) -> bool:
        """Whether a unit's row names its results, and they are stored as they were."""
        results = unit.get(RESULTS) or {}
        pairs = ((self.get(table, key), crc) for table, crc in results.items())
        return bool(results) and all(row is not None and checksum(row) == crc for row, crc in pairs)

    def _read_all(self) -> None:
        """Read the rows of all segments."""
        for _ in range(_READINGS):
            self._tables, self._segments, self._damaged = {}, [], {}
            try:
                for name in self._run.list(self._run.ledger):
                    if name.endswith(".jsonl"):
                        self._read(name)
            except FileNotFoundError:  # merged by the writer since it was listed
                time.sleep(_PAUSE_S)
            except OSError as error:
                raise ConfigError(
                    f"--run-dir {self._run.shown}: its ledger cannot be read: {error}"
                ) from error
            else:
                return
        raise ConfigError(
            f"--run-dir {self._run.shown}: its ledger changes while it is read: another raypipe "
            "command is writing it; try again"
        )

    def _read(self, name: str) -> None:
        """Read the rows of a segment, and note its damaged lines."""
        path = f"{self._run.ledger}/{name}"
        content = self._run.read(path)
        damaged, last, size = list[str](), 0, 0
        for number, line in enumerate(BytesIO(content), start=1):
            if not line.endswith(b"\n"):  # the next append overwrites it
                if not self._writable:
                    log.warning("%s: cut off a half-written last line (%d bytes)", path, len(line))
                break
            last, size = last + 1, size + len(line)
            entry = decode(line)
            if entry is None:
                damaged.append(f"line {number}")
                continue
            table, key, row, place = entry
            if place != last:
                damaged.append(f"before line {number}")
                last = place
            rows = self._tables.setdefault(table, {})
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
        self._segments.append(name)
        self._end = size, last
        if damaged:
            self._damaged[name] = damaged


class LedgerView(Ledger):
    """The rows that a stage of a variant sees; what it puts belongs to its variant.

    Variants of a run use the same keys; the underlying ledger holds them as ``key@variant``.

    Args:
        ledger: the ledger of the run.
        variant: the variant whose rows are written.
        visible: the variants whose rows are read, the stage's own among them.
        stage: the key of the stage; the tables that it writes are recorded (:func:`writes`).

    """

    def __init__(
        self, ledger: Ledger, variant: str, visible: Iterable[str] = (), stage: str = ""
    ) -> None:
        self._ledger, self._variant, self._stage = ledger, variant, stage
        self._visible = tuple(dict.fromkeys((variant, *visible)))

    def put_tables(self, tables: Mapping[str, Mapping[str, Row]]) -> None:
        """Record rows of several tables with one disk sync."""
        mark = {} if self._variant == BASE else {"variant": self._variant}
        own = {
            table: {
                self._key(table, key): {**row, **(mark if _has_variant(table) else {})}
                for key, row in rows.items()
            }
            for table, rows in tables.items()
        }
        written = [t for t, rows in tables.items() if self._stage and rows and t not in INTERNAL]
        if new := [table for table in written if not writes(self._ledger, self._stage, table)]:
            entries: dict[str, Row] = {_entry(self._stage, table): {} for table in new}
            own[_RUNS] = {**own.get(_RUNS, {}), **entries}
        self._ledger.put_tables(own)

    def remove(self, table: str, keys: Iterable[str]) -> None:
        """Remove rows of this variant durably; missing ones are ignored."""
        self._ledger.remove(table, [self._key(table, key) for key in keys])

    def get(self, table: str, key: str) -> Row | None:
        """Return the newest row of a key, or None; this variant's comes first."""
        for variant in self._visible if table != _UNITS else (self._variant,):
            row = self._ledger.get(table, self._key(table, key, variant))
            if row is not None:
                return row
        return None

    def rows(self, table: str) -> list[Row]:
        """Return all visible rows of a table, in the order in which their keys first appeared."""
        return [row for row in self._ledger.rows(table) if self._sees(row)]

    def items(self, table: str) -> list[tuple[str, Row]]:
        """Return the keys of all visible rows of a table with their rows."""
        return [
            (key.removesuffix(f"@{row.get('variant', BASE)}"), row)
            for key, row in self._ledger.items(table)
            if self._sees(row)
        ]

    def tables(self) -> list[str]:
        """Return the names of the tables that have rows in any variant."""
        return self._ledger.tables()

    def _sees(self, row: Row) -> bool:
        return row.get("variant", BASE) in self._visible

    def _key(self, table: str, key: str, variant: str | None = None) -> str:
        return variant_name(key, variant or self._variant) if _has_variant(table) else key


def writes(ledger: Ledger, stage: str, table: str) -> bool:
    """Whether a stage, by its key, has put rows into a table."""
    return ledger.get(_RUNS, _entry(stage, table)) is not None


def _entry(stage: str, table: str) -> str:
    return f"written/{stage}/{table}"


def _has_variant(table: str) -> bool:
    return table not in INTERNAL or table == _UNITS


def checksum(row: Row) -> int:
    """Return the checksum of a result, without the columns that are added on its way."""
    own = {name: value for name, value in row.items() if name not in _ADDED}
    return zlib.crc32(json.dumps(own, sort_keys=True).encode())


def encode(entries: Iterable[_Entry], before: int) -> bytes:
    """Return the lines of entries, numbered from ``before`` on."""
    lines = []
    for number, (table, key, row) in enumerate(entries, start=before + 1):
        content = {"table": table, "key": key, "row": row, "line": number}
        line = json.dumps(content).removesuffix("}").encode()
        lines.append(b"%s%s%d}\n" % (line, _CRC, zlib.crc32(line)))
    return b"".join(lines)


def decode(line: Any) -> tuple[str, str, Row | None, int] | None:
    """Return table, key, row and number of a line; None if it is damaged, or not bytes."""
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        content = line.rpartition(_CRC)[0]
        if line != b"%s%s%d}\n" % (content, _CRC, zlib.crc32(content)):
            return None
        # shared strings: 10^5 rows have the same names
        entry = json.loads(line, object_pairs_hook=lambda pairs: {intern(k): v for k, v in pairs})
        table, key, row, number = entry["table"], entry["key"], entry["row"], entry["line"]
        kinds = ((table, str), (key, str), (row, dict | None), (number, int))
        if all(isinstance(value, kind) for value, kind in kinds):
            return table, key, row, number
    return None
