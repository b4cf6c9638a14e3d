"""Metrics of a script: read while the script writes them, in the formats that are common."""

from __future__ import annotations

import ast
import csv
import json
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

#: a record as the script wrote it: names and plain values
Record = dict[str, Any]

#: share of the time that reading may take
_SHARE = 0.1
_POLL_S = 0.05
#: bytes before the read position that must be the same when reading goes on
_OVERLAP = 64
#: lines of a file that are named if they begin like a record and cannot be read
_MOST_NOTES = 3
_SHOWN = 80
_SEPARATORS = ",;\t|"
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
#: a number in a form that is not read: 1.234,5 or 1 000 or "0,5" in a comma-separated file
_FORMATTED = re.compile(
    r"[+-]?(?=[\d.]*[^\d.])\d+(?:[., '_\u00a0\u202f]\d+)*(?:[eE][+-]?\d+)?\s*%?"
)


class Reading(NamedTuple):
    """Records that were read together, and remarks on lines that could not be read.

    ``restarted``: the file is another one, or was truncated. ``problem``: why the file cannot be
    read on.
    """

    records: list[Record]
    restarted: bool = False
    notes: tuple[str, ...] = ()
    problem: str | None = None


class MetricsFile:
    """Reader of the newest file of a pattern, which may appear late, grow, or be truncated.

    Lines (JSON, Python dicts) and CSV are read as they grow, up to the last whole line. A ``.json``
    file is a list of records, or a document with one under ``log_history`` (``trainer_state.json``
    of Hugging Face's Trainer); it is read again when it changes.
    """

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._path: Path | None = None
        self._state: tuple[int, int, int] | None = None
        self._next_look, self._position, self._tail = 0.0, 0, b""

    def files(self) -> list[Path]:
        """Return the files of the pattern, the newest last."""
        changed = {}
        for path in self._folder.glob(self._pattern):
            with suppress(OSError):  # deleted meanwhile
                if path.is_file():
                    changed[path] = path.stat().st_mtime_ns
        return sorted(changed, key=lambda path: (changed[path], str(path)))

    def read(self, *, last: bool = False) -> Reading:
        """Return the records since the last call; with ``last`` also an unfinished last line."""
        started = time.monotonic()
        if started < self._next_look and not last:
            return Reading([])
        batch = self._read(last=last)
        took = time.monotonic() - started
        self._next_look = started + took + max(_POLL_S, took / _SHARE)
        return batch

    def _read(self, *, last: bool) -> Reading:
        try:
            path = self.files()[-1]
            stat = path.stat()
        except (IndexError, OSError):
            return Reading([])
        before, state = (self._path, self._state), (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if before == (path, state) and not last:
            return Reading([])
        self._path, self._state = path, state
        known = before[0] is not None
        if path.suffix == ".json":
            return Reading(_document(path), known)
        with path.open("rb") as stream:
            stream.seek(self._position - len(self._tail))
            content = stream.read()
            same = before[0] == path and before[1] is not None and before[1][0] == stat.st_ino
            restarted = not (same and content.startswith(self._tail))
            if restarted:
                self._position, self._tail = 0, b""
                self._lines = Lines(of_csv=path.suffix == ".csv")
                stream.seek(0)
                content = stream.read()
        content = content[len(self._tail) :]
        end = len(content) if last else content.rfind(b"\n") + 1
        self._position += end
        self._tail = (self._tail + content[:end])[-_OVERLAP:]
        text = content[:end].decode(errors="replace").removesuffix("\n")
        batch = self._lines.read(text.split("\n") if end else [], last=last)
        return batch._replace(restarted=restarted and known)


class Lines:
    """Reader of consecutive lines: JSON or Python dicts, among others, or CSV."""

    def __init__(self, *, of_csv: bool = False) -> None:
        self._of_csv = of_csv
        self._number = self._unread = 0
        self._problem: str | None = None
        #: a CSV row that goes on within quotes
        self._row = ""
        self._separator = ""
        self._names: list[str] = []
        self._decimal: str | None = None
        #: the names whose texts were named, as they look like numbers
        self._formatted: set[str] = set()

    def read(self, lines: list[str], *, last: bool = False) -> Reading:
        """Return the records of the next lines; with ``last`` there are no further ones."""
        records: list[Record] = []
        notes: list[str] = []
        for line in lines if self._problem is None else ():
            self._number += 1
            text = line.removesuffix("\r").removeprefix("\ufeff" if self._number == 1 else "")
            try:
                record = self._cells(text) if self._of_csv else record_of(text)
            except (ValueError, csv.Error) as error:
                note = f"line {self._number}: {error}"
                if self._of_csv:
                    self._problem = note
                    break
                self._unread += 1
                if self._unread <= _MOST_NOTES:
                    more = " (further ones are not named)" * (self._unread == _MOST_NOTES)
                    notes.append(note + more)
                continue
            if record:
                records.append(record)
                notes += self._unread_numbers(record)
        if last and self._row and self._problem is None:
            self._problem = f"line {self._number}: a quote is not closed"
        return Reading(records, notes=tuple(notes), problem=self._problem)

    def _unread_numbers(self, record: Record) -> Iterator[str]:
        """Yield a remark on the first text of each name that a reader would take for a number."""
        for name, value in record.items():
            if name in self._formatted or not isinstance(value, str) or _number(value) is not None:
                continue
            if _FORMATTED.fullmatch(value.strip()):
                self._formatted.add(name)
                yield (
                    f"line {self._number}: {name} = {value[:_SHOWN]}: is not read as a number; "
                    "write it with a decimal point and without other signs"
                )

    def _cells(self, line: str) -> Record | None:
        """Return the record of a CSV row; None for a header, or if the row goes on.

        Raises:
            ValueError: the row does not fit its header.

        """
        row = f"{self._row}\n{line}" if self._row else line
        self._row = ""
        if not row.strip():
            return None
        separator = self._separator or _separator_of(row)
        *cells, after = next(csv.reader([row + separator], delimiter=separator))
        if after:  # within quotes
            self._row = row
            return None
        cells = [cell.strip() for cell in cells]
        if self._is_header(cells):
            if twice := {name for name in cells if name and cells.count(name) > 1}:
                raise ValueError(f"the header names {min(twice)} twice; give each column its name")
            self._names, self._separator = cells, separator
            return None
        if len(cells) != len(self._names):
            raise ValueError(
                f"{len(cells)} cells for the {len(self._names)} names of the header "
                f"({', '.join(self._names)}); write a new header when columns change, and separate "
                "cells by a comma, semicolon or tab"
            )
        return dict(zip(self._names, map(self._with_point, cells), strict=True))

    def _is_header(self, cells: list[str]) -> bool:
        """Whether a row is a header: the first one, or one that has names and no numbers."""
        count = sum(_number(cell) is not None or _has_comma(cell) for cell in cells)
        if not self._names:
            if count == len(cells):
                raise ValueError(f"{', '.join(cells)}: must be the names of the columns")
            return True
        if count or not all(cells[1:]):
            return False
        if not set(cells) & (set(self._names) - {""}):
            raise ValueError(
                f"{', '.join(cells)}: neither numbers nor names of the header "
                f"({', '.join(self._names)}); cells are separated by a comma, semicolon or tab"
            )
        return True

    def _with_point(self, cell: str) -> str:
        """Return a cell with a decimal point. Raises ValueError if the file mixes both signs."""
        sign = "," if _has_comma(cell) else "." if "." in cell and _number(cell) is not None else ""
        if sign == "," and self._separator == ",":  # quoted: thousands, a list, or decimals
            return cell
        if sign and self._decimal not in (None, sign):
            raise ValueError(f"{cell}: the file has decimal points and decimal commas; use points")
        self._decimal = sign or self._decimal
        return cell.replace(",", ".") if sign == "," else cell


def _has_comma(cell: str) -> bool:
    return _DECIMAL_COMMA.fullmatch(cell) is not None


def _separator_of(header: str) -> str:
    counts = {sign: len(next(csv.reader([header], delimiter=sign))) for sign in _SEPARATORS}
    best = [sign for sign, count in counts.items() if count == max(counts.values())]
    if len(best) > 1 and max(counts.values()) > 1:
        raise ValueError(f"{header}: the separator may be {' or '.join(best)}; use one of them")
    return best[0]


def record_of(line: str) -> Record | None:
    """Return the record of a line: a JSON object, or a dict as Python prints it; else None.

    Raises:
        ValueError: it begins like a record and cannot be read.

    """
    text = line.strip()
    if not text.startswith("{"):
        return None
    record: Any = None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        with warnings.catch_warnings(), suppress(ValueError, RecursionError, MemoryError):
            warnings.simplefilter("ignore")  # of the compiler, such as invalid escapes
            with suppress(SyntaxError):
                record = _plain(ast.parse(text, mode="eval").body)
    if not isinstance(record, dict):
        raise ValueError(  # noqa: TRY004 - of the line
            f"begins like a record and cannot be read: {text[:_SHOWN]}"
        )
    return record


def _plain(node: ast.expr | None) -> Any:
    """Return the value of a literal; None for anything that is not a number, a text or a dict.

    Numbers may be nan, or scalars of numpy and torch: ``tensor(0.5, device='cuda:0')``.
    """
    if isinstance(node, ast.Dict):
        return {str(_plain(k)): _plain(v) for k, v in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.Call) and node.args:
        return _plain(node.args[0])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _plain(node.operand)
        return -value if isinstance(value, int | float) else None
    if isinstance(node, ast.Name):
        return {"nan": math.nan, "inf": math.inf}.get(node.id.lower())
    return node.value if isinstance(node, ast.Constant) else None


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by their names; of nested ones as ``outer/inner``.

    Text is a number if it can be read as one. Truth values are not numbers. Values may be NaN.
    """
    values: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            values |= {f"{name}/{inner}": each for inner, each in numbers(value).items()}
        elif not isinstance(value, bool) and (number := _number(value)) is not None:
            values[str(name)] = number
    return values


def _number(value: Any) -> float | None:
    """Return the number of a text or a number; not of ``2024_01``, which Python would read."""
    try:
        return None if isinstance(value, str) and "_" in value else float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _document(path: Path) -> list[Record]:
    """Return the records of a JSON document; none while it is incomplete."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
    except (ValueError, RecursionError, OSError):
        return []
    if isinstance(content, Mapping):
        history = content.get("log_history")
        content = history if isinstance(history, list) else [content]
    records = content if isinstance(content, list) else []
    return [record for record in records if isinstance(record, dict)]
