"""Ledger: the durable record of finished units and their results.

The ledger is a log of rows ``(table, key, row)``; the newest row of a key counts. One writer
appends, and each append is on disk before it returns. The results tables derive from it. Only the
place of each row is kept in memory, since there may be millions. On a local file system the ledger
is one growing file. Object storage cannot append, so there it is a few segments, which are merged
before they become many. A line has rows of one table that were put together. It ends with its
number in the file and the CRC-32 of the line, which reveals damaged, missing and misplaced lines.
No two writers use the same segment name, and each segment is complete: if a replaced writer's
segment arrives late, it only adds rows.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import zlib
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BufferedReader
from itertools import chain, groupby
from pathlib import Path
from sys import intern
from threading import RLock
from typing import Any

import pyarrow as pa
from pydantic_core import from_json, to_json

from raypipe.errors import ConfigError, named
from raypipe.store.run_directory import BASE, RunDirectory, variant_name

Row = dict[str, Any]
#: table, keys, and a list of their rows as JSON; ``null`` if they were removed
Entry = tuple[str, list[str], bytes]
#: place of each row's line by table and key: its first byte in the segments, times ``_LONGEST``,
#: plus its length: one number, which takes less memory than a tuple
_Places = dict[str, dict[str, int]]
_LONGEST = 2**30
#: rows of a line at most: reading one row parses all of its line
_TOGETHER = 64
#: bytes of lines whose other rows are kept after reading one: units end in another order than
#: they are asked for, so that several lines are read by turns
_MOST_READ = 2**22
_MAX_SEGMENTS = 32
#: attempts of a reader, with pauses, if segments are merged while it reads
_READINGS, _PAUSE_S = 6, 0.5
# parts of a line: {"table": "...", "keys": ["..."], "rows": [{...}], "line": 1, "crc": 2}
_ROWS, _LINE, _CRC, _REMOVED = b', "rows": ', b', "line": ', b', "crc": ', b"null"

#: the table of finished units; such a row may have the checksums of the rows that are its result,
#: which have the unit's key, by table
_UNITS, RESULTS = "units", "results"
#: the table of what is recorded about the run itself
RUNS = "runs"
#: its entry whether tables and report show everything that is stored
SHOWN = "shown"
#: the table of what commands that share a run have claimed
CLAIMS = "job_claims"
#: columns that are added to a row on its way to the ledger
_ADDED = ("command_id", "variant")
#: suffix of a segment with damaged lines that was replaced
REPLACED = ".damaged"
#: the tables that all variants have in common
_COMMON = frozenset({RUNS, CLAIMS, "identities", "code"})
#: the runner's own records: they are not results, have no stamp and become no table
INTERNAL = frozenset({_UNITS, *_COMMON})

#: types of values that pydantic encodes as Python does
_PLAIN = frozenset({str, int, float, bool, type(None)})

log = logging.getLogger(__name__)


class Ledger:
    """The rows of a run on disk, found by their keys.

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

    _places: _Places
    _segments: list[str]
    _damaged: dict[str, list[str]]  # by segment, its damaged lines in words
    # where each segment that is open begins, if they are seen as one file
    _starts: list[int]
    _files: list[pa.NativeFile]
    _end: tuple[int, int]  # the bytes of all, and the lines of the last one

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
        self._lock = RLock()
        self.changes = 0
        self._writable = writable
        #: rows of lines that were read, by place, which nobody has asked for; bytes of these lines
        self._read_rows: dict[int, dict[str, Row]] = {}
        self._read_bytes = 0
        self._token = secrets.token_hex(4)
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

    def exclusively(self) -> AbstractContextManager[object]:
        """Let nobody else write in the body."""
        return self._lock

    def put(self, table: str, rows: Mapping[str, Row]) -> None:
        """Record rows by key, durably; they replace earlier rows with the same keys."""
        self.put_tables({table: rows})

    def put_tables(self, tables: Mapping[str, Mapping[str, Row]]) -> None:
        """Record rows of several tables with one disk sync."""
        entries = list[Entry]()
        for table, rows in tables.items():
            keys, stamp = list(rows), {} if table in INTERNAL else self._stamp
            for first in range(0, len(keys), _TOGETHER):
                part = keys[first : first + _TOGETHER]
                entries += _as_entries(table, part, [{**stamp, **rows[key]} for key in part])
        with self._lock:
            self._append(entries)
            self.changes += bool(entries)

    def remove(self, table: str, keys: Iterable[str]) -> None:
        """Remove rows durably; missing ones are ignored."""
        with self._lock:
            known = [key for key in keys if key in self._places.get(table, {})]
            self._append([(table, known, _REMOVED)] if known else [])
            self.changes += bool(known)

    def get(self, table: str, key: str) -> Row | None:
        """Return the newest row of a key, or None."""
        with self._lock:
            place = self._places.get(table, {}).get(key)
            if place is None:
                return None
            if key not in self._read_rows.get(place, ()):
                if self._read_bytes > _MOST_READ:
                    self._read_rows, self._read_bytes = {}, 0
                keys, text = self._line(place)
                self._read_rows[place] = dict(zip(keys, _parsed(text), strict=True))
                self._read_bytes += len(text)
            return self._read_rows[place].pop(key)  # the caller may change it

    def rows(self, table: str) -> list[Row]:
        """Return all rows of a table, in the order in which their keys first appeared."""
        return [row for _, row in self.items(table)]

    def items(self, table: str) -> Iterator[tuple[str, Row]]:
        """Yield the present keys of a table with their rows, which are read one by one."""
        with self._lock:
            keys = list(self._places.get(table, {}))
        for key in keys:
            if (row := self.get(table, key)) is not None:
                yield key, row

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        with self._lock:
            return len(self._places.get(table, {}))

    def tables(self) -> list[str]:
        """Return the names of the tables that have rows."""
        with self._lock:
            return [table for table, places in self._places.items() if places]

    def _append(self, entries: Sequence[Entry]) -> None:
        if not self._writable:
            raise RuntimeError("this ledger was opened for reading")
        if not entries:
            return
        self._before_writing()
        if self._run.is_local and self._files:
            self._append_local(entries)
        elif len(self._segments) < _MAX_SEGMENTS:
            self._write_segment(entries)
        else:
            self._rewrite(entries)

    def _append_local(self, entries: Sequence[Entry]) -> None:
        lines = encode(entries, self._end[1])
        path, size = self._last()
        with path.open("ab") as stream:
            stream.truncate(size)  # what an append left that was interrupted, or had no room
            stream.writelines(lines)
            stream.flush()
            os.fsync(stream.fileno())
        self._note_lines(entries, lines)

    def _last(self) -> tuple[Path, int]:
        """Return the path of the last segment on a file system, and the bytes of its lines."""
        return Path(self._run.ledger, self._segments[-1]), self._end[0] - self._starts[-1]

    def _write_segment(self, entries: Sequence[Entry]) -> None:
        """Write a new segment, and open it."""
        number = int(self._segments[-1][:8]) + 1 if self._segments else 0
        writer = "" if self._run.is_local else f"-{self._token}"
        name = f"{number:08d}{writer}.jsonl"
        lines = encode(entries)
        content = b"".join(lines)
        self._segments.append(name)  # never reused, since it may have been written
        self._run.write(f"{self._run.ledger}/{name}", content)
        self._add(self._opened(name, content))
        self._note_lines(entries, lines)

    def _rewrite(self, entries: Sequence[Entry] = ()) -> None:
        """Write all rows and the new ones to one segment, then remove the segments it replaces."""
        earlier = [
            self._entry(table, place, list(keys))
            for table, places in self._places.items()
            for place, keys in groupby(places, places.__getitem__)
        ]
        self._write_segment([*earlier, *entries])
        self._starts, self._files = self._starts[-1:], self._files[-1:]
        *replaced, new = self._segments
        for old in replaced:
            path = f"{self._run.ledger}/{old}"
            if old in self._damaged:
                self._run.fs.move(path, f"{path}{REPLACED}")
            else:
                self._run.delete(path)
        self._segments, self._damaged = [new], {}

    def _entry(self, table: str, place: int, keys: list[str]) -> Entry:
        """Return the rows of a line that still count."""
        stored, text = self._line(place)
        if stored != keys:
            rows = dict(zip(stored, _parsed(text), strict=True))
            text = _json([rows[key] for key in keys])
        return table, keys, text

    def _add(self, file: pa.NativeFile) -> None:
        """Add an open segment, whose lines are noted next, behind the others."""
        begin, _ = self._end
        self._starts, self._files = [*self._starts, begin], [*self._files, file]
        self._end = begin, 0

    def _note_lines(self, entries: Iterable[Entry], lines: Iterable[bytes]) -> None:
        """Note the places of lines that were written at the end."""
        for entry, line in zip(entries, lines, strict=True):
            self._note(*entry, len(line))

    def _note(self, table: str, keys: list[str], rows: bytes, length: int) -> None:
        """Note the place of the next line; forget those of removed rows."""
        begin, number = self._end
        of_table = self._places.setdefault(table, {})
        if rows == _REMOVED:
            for key in keys:
                of_table.pop(key, None)
        else:
            of_table.update(dict.fromkeys(keys, begin * _LONGEST + length))
        self._end = begin + length, number + 1

    def _opened(self, name: str, content: bytes | None = None) -> pa.NativeFile:
        """Open a segment; what an object store has is read once, or known already."""
        path = f"{self._run.ledger}/{name}"
        if self._run.is_local:
            return self._run.fs.open_input_file(path)
        return pa.BufferReader(self._run.read(path) if content is None else content)

    def _line(self, place: int) -> tuple[list[str], bytes]:
        """Return keys and rows of a line. Raises OSError if it was damaged since it was read."""
        begin, length = divmod(place, _LONGEST)
        number = bisect(self._starts, begin) - 1
        entry = decode(self._files[number].read_at(length, begin - self._starts[number]))
        if entry is None:
            raise OSError(f"{self._run.ledger}: a line was damaged while this command runs")
        return entry[1:3]

    def _keep_intact_units(self) -> str:
        """Keep the units whose results match their checksums; return a message about the damage."""
        found = dict(self.items(_UNITS))
        with_results = {table for unit in found.values() for table in unit.get(RESULTS, ())}
        known = {*found, *(key for table in with_results for key in self._places.get(table, ()))}
        intact = {key for key, unit in found.items() if self._is_intact(key, unit)}
        for key in found.keys() - intact:
            del self._places[_UNITS][key]
        places = [f"{line} of {name}" for name, lines in self._damaged.items() for line in lines]
        again = f"{len(known) - len(intact)} of {len(known)} units run again"
        return f"{named(places)}; {again}; the others are intact"

    def _is_intact(self, key: str, unit: Row) -> bool:
        """Whether a unit's row names its results, and they are stored as they were."""
        results = unit.get(RESULTS) or {}
        pairs = ((self.get(table, key), crc) for table, crc in results.items())
        return bool(results) and all(row is not None and checksum(row) == crc for row, crc in pairs)

    def _read_all(self) -> None:
        """Read the rows of all segments."""
        for _ in range(_READINGS):
            self._places, self._segments, self._damaged = {}, [], {}
            self._starts, self._files, self._end = [], [], (0, 0)
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
        file = self._opened(name)
        self._add(file)
        lines = BufferedReader(file)
        self._segments.append(name)
        self._read_lines(lines)
        lines.detach()  # or the end of the reader would close the file

    def _read_lines(self, lines: Iterable[bytes]) -> None:
        """Read the rows of the next lines of the last segment."""
        damaged, name = list[str](), self._segments[-1]
        for number, line in enumerate(lines, start=self._end[1] + 1):
            if not line.endswith(b"\n"):  # the next append overwrites it
                if not self._writable:
                    path = f"{self._run.ledger}/{name}"
                    log.warning("%s: cut off a half-written last line (%d bytes)", path, len(line))
                break
            begin, last = self._end
            entry = decode(line)
            if entry is None:
                damaged.append(f"line {number}")
                self._end = begin + len(line), last + 1
                continue
            table, keys, rows, place = entry
            if place != last + 1:
                damaged.append(f"before line {number}")
                self._end = begin, place - 1
            self._note(table, keys, rows, len(line))
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
        own, mark = dict(tables), {"variant": self._variant}
        for table in tables.keys() - _COMMON if self._variant != BASE else ():
            rows = tables[table].items()
            own[table] = {variant_name(key, self._variant): {**row, **mark} for key, row in rows}
        written = [t for t, rows in tables.items() if self._stage and rows and t not in INTERNAL]
        if new := [table for table in written if not writes(self._ledger, self._stage, table)]:
            entries: dict[str, Row] = {_entry(self._stage, table): {} for table in new}
            own[RUNS] = {**own.get(RUNS, {}), **entries}
        self._ledger.put_tables(own)

    def remove(self, table: str, keys: Iterable[str]) -> None:
        """Remove rows of this variant durably; missing ones are ignored."""
        self._ledger.remove(table, [_key(table, key, self._variant) for key in keys])

    def get(self, table: str, key: str) -> Row | None:
        """Return the newest row of a key, or None; this variant's comes first."""
        for variant in self._visible if table != _UNITS else (self._variant,):
            row = self._ledger.get(table, _key(table, key, variant))
            if row is not None:
                return row
        return None

    def items(self, table: str) -> Iterator[tuple[str, Row]]:
        """Yield the keys of all visible rows of a table with their rows."""
        for key, row in self._ledger.items(table):
            if self._sees(row):
                yield key.removesuffix(f"@{row.get('variant', BASE)}"), row

    def count(self, table: str) -> int:
        """Return the number of rows of a table in all variants."""
        return self._ledger.count(table)

    def tables(self) -> list[str]:
        """Return the names of the tables that have rows in any variant."""
        return self._ledger.tables()

    def _sees(self, row: Row) -> bool:
        return row.get("variant", BASE) in self._visible


def writes(ledger: Ledger, stage: str, table: str) -> bool:
    """Whether a stage, by its key, has put rows into a table."""
    return ledger.get(RUNS, _entry(stage, table)) is not None


def _entry(stage: str, table: str) -> str:
    return f"written/{stage}/{table}"


def _key(table: str, key: str, variant: str) -> str:
    return key if table in _COMMON else variant_name(key, variant)


def checksum(row: Row) -> int:
    """Return the checksum of a result, without the columns that are added on its way."""
    own = {name: value for name, value in row.items() if name not in _ADDED}
    return zlib.crc32(_json(own))


def encode(entries: Iterable[Entry], before: int = 0) -> list[bytes]:
    """Return the lines of entries, numbered from ``before`` on."""
    lines = []
    for number, (table, keys, rows) in enumerate(entries, start=before + 1):
        head = b'{"table": %s, "keys": %s' % (_json(table), _json(keys))
        line = b"%s%s%s%s%d" % (head, _ROWS, rows, _LINE, number)
        lines.append(b"%s%s%d}\n" % (line, _CRC, zlib.crc32(line)))
    return lines


def decode(line: Any) -> tuple[str, list[str], bytes, int] | None:
    """Return table, keys, rows as JSON, and number of a line; None if damaged, or not bytes."""
    try:
        content, _, end = line.rpartition(_CRC)
        if end != b"%d}\n" % zlib.crc32(content):
            return None
        head, _, rest = content.partition(_ROWS)
        rows, _, number = rest.rpartition(_LINE)
        table, keys = _parsed(head + b"}").values()
        return intern(table), keys, rows, int(number)
    except (ValueError, TypeError, AttributeError):
        return None


def _as_entries(table: str, keys: list[str], rows: list[Row]) -> list[Entry]:
    """Return rows to put together: one entry, or several of long rows. Raises TypeError."""
    is_plain = table in INTERNAL or _is_plain(rows)
    text = _json(rows) if is_plain else json.dumps(rows).encode()
    if len(text) <= _MOST_READ or len(keys) == 1:
        return [(table, keys, text)]
    half = len(keys) // 2  # reading one row parses all of its line
    halves = (keys[:half], rows[:half]), (keys[half:], rows[half:])
    return [entry for part in halves for entry in _as_entries(table, *part)]


def _is_plain(rows: Sequence[Row]) -> bool:
    """Whether pydantic encodes the rows as Python does; it would accept sets, dates and paths."""
    types = {*map(type, chain.from_iterable(map(dict.values, rows)))}
    return types <= _PLAIN and {*map(type, set().union(*rows))} <= {str}


def _json(value: Any) -> bytes:
    """Return plain values as JSON. Raises TypeError."""
    try:
        return to_json(value)  # in half the time of Python's
    except ValueError:  # half a surrogate pair, or what JSON cannot hold: a TypeError
        return json.dumps(value).encode()


def _parsed(text: bytes) -> Any:
    """Parse JSON."""
    try:
        return from_json(text)  # in half the time of Python's
    except ValueError:  # half a surrogate pair, which names of files may have
        return json.loads(text)
