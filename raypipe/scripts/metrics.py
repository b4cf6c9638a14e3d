"""Metrics of a script: read while the script writes them, in the formats that are common."""

from __future__ import annotations

import ast
import csv
import io
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

    Lines (JSON, Python dicts) and CSV are read up to the last whole line. A ``.json`` file is a
    list of records, or a document with one under ``log_history`` (``trainer_state.json`` of Hugging
    Face's Trainer). A file that changed is read from its start; records that were read before are
    left out, if it only grew.
    """

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._state: tuple[Path, int, int, int] | None = None
        self._text, self._count, self._next_look = "", 0, 0.0
        self._noted: set[str] = set()

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
            state = (path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if state == self._state and not last:
                return Reading([])
            text = path.read_bytes().decode("utf-8-sig", errors="replace")
        except (IndexError, OSError):
            return Reading([])
        self._state = state
        if path.suffix == ".json":
            found = Reading(_document(text))
        else:
            text = text if last else text[: text.rfind("\n") + 1]
            found = _table(text, last=last) if path.suffix == ".csv" else _lines(text)
        known = self._count if text.startswith(self._text) else 0
        restarted = self._count > 0 and known == 0
        self._text, self._count = text, len(found.records)
        notes = tuple(note for note in found.notes if note not in self._noted)
        self._noted.update(notes)
        return found._replace(records=found.records[known:], restarted=restarted, notes=notes)


def _lines(text: str) -> Reading:
    """Return the records of lines: JSON or Python dicts, among others."""
    records: list[Record] = []
    notes: list[str] = []
    named, unread = set[str](), 0
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            record = record_of(line)
        except ValueError as error:
            unread += 1
            if unread <= _MOST_NOTES:
                more = " (further ones are not named)" * (unread == _MOST_NOTES)
                notes.append(f"line {number}: {error}{more}")
            continue
        if record:
            records.append(record)
            notes += _unread_numbers(number, record, named)
    return Reading(records, notes=tuple(notes))


def _unread_numbers(line: int, record: Record, named: set[str]) -> Iterator[str]:
    """Yield a remark on the first text of each name that a reader would take for a number."""
    for name, value in record.items():
        if name in named or not isinstance(value, str) or _number(value) is not None:
            continue
        if _FORMATTED.fullmatch(value.strip()):
            named.add(name)
            yield (
                f"line {line}: {name} = {value[:_SHOWN]}: is not read as a number; "
                "write it with a decimal point and without other signs"
            )


def _table(text: str, *, last: bool) -> Reading:
    """Return the records of CSV, up to a row that does not fit its header."""
    records: list[Record] = []
    notes: list[str] = []
    names: list[str] = []
    signs, named = set[str](), set[str]()
    rows = csv.reader(())
    try:
        separator = _separator_of(text.lstrip("\r\n").partition("\n")[0])
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        for row in rows:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if _is_header(cells, names):
                names = cells
                continue
            records.append(_record(cells, names, separator, signs))
            notes += _unread_numbers(rows.line_num, records[-1], named)
    except (ValueError, csv.Error) as error:
        problem: str | None = f"line {rows.line_num or 1}: {error}"
        if str(error) == "unexpected end of data":  # within quotes
            problem = f"line {rows.line_num}: a quote is not closed" if last else None
        return Reading(records, notes=tuple(notes), problem=problem)
    return Reading(records, notes=tuple(notes))


def _is_header(cells: list[str], names: list[str]) -> bool:
    """Whether a row is a header: the first one, or one that has names and no numbers.

    Raises:
        ValueError: it is neither a header nor a row of values.

    """
    count = sum(_number(cell) is not None or _has_comma(cell) for cell in cells)
    if names and (count or not all(cells[1:])):
        return False
    if not names and count == len(cells):
        raise ValueError(f"{', '.join(cells)}: must be the names of the columns")
    if names and not set(cells) & (set(names) - {""}):
        raise ValueError(
            f"{', '.join(cells)}: neither numbers nor names of the header "
            f"({', '.join(names)}); cells are separated by a comma, semicolon or tab"
        )
    if twice := {name for name in cells if name and cells.count(name) > 1}:
        raise ValueError(f"the header names {min(twice)} twice; give each column its name")
    return True


def _record(cells: list[str], names: list[str], separator: str, signs: set[str]) -> Record:
    """Return the record of a row; ``signs`` receives the decimal signs of the file.

    Raises:
        ValueError: the row does not fit its header, or the file has both decimal signs.

    """
    if len(cells) != len(names):
        raise ValueError(
            f"{len(cells)} cells for the {len(names)} names of the header "
            f"({', '.join(names)}); write a new header when columns change, and separate "
            "cells by a comma, semicolon or tab"
        )
    record = dict(zip(names, cells, strict=True))
    for name, cell in record.items():
        if _has_comma(cell) and separator != ",":  # else quoted: thousands, a list, or decimals
            signs.add(",")
            record[name] = cell.replace(",", ".")
        elif "." in cell and _number(cell) is not None:
            signs.add(".")
        if len(signs) > 1:
            raise ValueError(f"{cell}: the file has decimal points and decimal commas; use points")
    return record


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


def _document(text: str) -> list[Record]:
    """Return the records of a JSON document; none while it is incomplete."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if isinstance(content, Mapping):
        history = content.get("log_history")
        content = history if isinstance(history, list) else [content]
    records = content if isinstance(content, list) else []
    return [record for record in records if isinstance(record, dict)]
