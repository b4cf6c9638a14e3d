"""Layout of a table for a terminal: a line per row, as wide as the terminal at most.

Columns with one value are named below the table. If the rest is too wide, long cells lose their
middle, and then the last columns are left out, also named below. A single row becomes a line per
column.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
from rich.cells import cell_len

from raypipe.redaction import printable, without_credentials
from raypipe.store.run_directory import BASE
from raypipe.store.tables import COMMAND_ID, RUN_ID, VARIANT, better

#: columns whose values say nothing to a reader
_HIDDEN = (RUN_ID.name, COMMAND_ID.name)
#: characters between columns, to which a cell is shortened at most, and of a value below the table
_GAP, _SHORT, _LONGEST = "  ", 16, 60
#: rows on a terminal without --limit
MOST_ROWS = 100


@dataclass(frozen=True)
class _TextColumn:
    """A column as it is shown; a number is at the right. Cells lose their middle, or last words."""

    name: str
    cells: Sequence[str]
    is_number: bool
    is_fixed: bool
    rank: int
    by_words: bool
    widest: int = field(init=False)

    def __post_init__(self) -> None:
        longest = max(map(cell_len, self.cells), default=0)
        object.__setattr__(self, "widest", max(longest, cell_len(self.name)))

    @property
    def least(self) -> int:
        """The width below which others are left out first: numbers and names are not shortened."""
        if self.is_number or self.is_fixed:
            return self.widest
        return min(self.widest, max(_SHORT, cell_len(self.name)))

    def lines(self, width: int) -> list[str]:
        cells = (self.name, *self.cells)
        return [_fitted(cell, width, self.is_number, self.by_words) for cell in cells]


def terminal_width() -> int | None:
    """Return the columns of the terminal, or $COLUMNS; None for a pipe or a file."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return max(20, shutil.get_terminal_size().columns)
    return None


def view(
    rows: pa.Table,
    width: int | None,
    *,
    whole: bool = False,
    first: Sequence[str] = (),
    kept: int = 1,
    by_words: Collection[str] = (),
    how: str = "them with --columns NAME,NAME, or everything with --csv or --json",
) -> str:
    """Return a table as text.

    Args:
        rows: the table.
        width: characters of a line at most; None for any.
        whole: whether the columns were chosen: none is left out for having one value.
        first: the columns that matter most; by default the table's first one and its measures.
        kept: how many of them are never left out. They are shortened only if nothing else can be,
            the first one before the others.
        by_words: columns whose cells lose whole words at the end, and never a part of a value.
        how: how to see what is left out.

    """
    if not len(rows):
        return f"(no rows; columns: {', '.join(rows.column_names)})"
    hidden = [] if whole else [name for name in _HIDDEN if name in rows.column_names]
    columns = _columns(rows.drop_columns(hidden), first, first[:kept], by_words)
    constant: dict[str, str] = {}
    if not whole:
        columns, constant = _without_constant(columns, len(rows))
    if len(rows) == 1 and width is not None and _total(columns) > width:
        return "\n".join(_one_row(columns, width))
    shown, left_out = _fitting(columns, width)
    lines = _laid_out(shown, width)
    lines += _notes(constant, [column.name for column in left_out], how, width)
    return "\n".join(lines)


def shorten(text: str, width: int) -> str:
    """Return a text without its middle if it is too long: beginnings and ends tell more."""
    if cell_len(text) <= width:
        return text
    tail = (width - 1) // 2
    head = text[: width - tail - 1]
    while cell_len(head) > width - tail - 1:
        head = head[:-1]
    end = text[len(text) - tail :]
    while cell_len(end) > tail:
        end = end[1:]
    return f"{head}…{end}"


def cell(value: Any) -> str:
    """Return a value as a reader sees it: six digits, seconds of times, one line of texts."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    text = without_credentials(str(value))
    return printable(" ".join(text.split()))


def _columns(
    rows: pa.Table, first: Sequence[str], fixed: Sequence[str], by_words: Collection[str]
) -> list[_TextColumn]:
    first = first or [*rows.column_names[:1], *better(rows.schema)]
    ranks = {name: rank for rank, name in enumerate(first)}
    columns: list[_TextColumn] = []
    for place, name in enumerate(rows.column_names):
        kind = rows.schema.field(name).type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        cells = [cell(value) for value in rows.column(place).to_pylist()]
        rank = ranks.get(name, len(first) + place)
        columns.append(_TextColumn(name, cells, is_number, name in fixed, rank, name in by_words))
    return columns


def _without_constant(
    columns: Sequence[_TextColumn], rows: int
) -> tuple[list[_TextColumn], dict[str, str]]:
    """Return the columns that say something of a row, and the values of the others."""
    varying: list[_TextColumn] = []
    constant: dict[str, str] = {}
    for column in columns:
        is_empty = not any(column.cells)
        is_base = column.name == VARIANT.name and set(column.cells) == {BASE}
        if is_empty or is_base or (rows > 1 and len(set(column.cells)) == 1):
            constant[column.name] = "" if is_empty else column.cells[0]
        else:
            varying.append(column)
    if not varying:
        return list(columns)[:1], {k: v for k, v in constant.items() if k != columns[0].name}
    return varying, constant


def _total(columns: Sequence[_TextColumn], least: bool = False) -> int:
    widths = (column.least if least else column.widest for column in columns)
    return sum(widths) + len(_GAP) * max(0, len(columns) - 1)


def _fitting(
    columns: Sequence[_TextColumn], width: int | None
) -> tuple[list[_TextColumn], list[_TextColumn]]:
    """Return the columns that fit, by their ranks, and the others."""
    if width is None:
        return list(columns), []
    ranked = sorted(range(len(columns)), key=lambda place: columns[place].rank)
    kept: set[int] = set()
    for place in ranked:
        fits = _total([columns[i] for i in (*kept, place)], least=True) <= width
        if not kept or columns[place].is_fixed or fits:
            kept.add(place)
    return (
        [column for i, column in enumerate(columns) if i in kept],
        [column for i, column in enumerate(columns) if i not in kept],
    )


def _laid_out(columns: Sequence[_TextColumn], width: int | None) -> list[str]:
    widths = [column.widest for column in columns]
    if width is not None:
        excess = _total(columns) - width
        while excess > 0:  # the widest cells lose first
            place = max(range(len(columns)), key=lambda i: widths[i] - columns[i].least)
            if widths[place] <= columns[place].least:
                break
            widths[place] -= 1
            excess -= 1
        for place in sorted(range(len(columns)), key=lambda i: columns[i].rank):
            if columns[place].is_fixed:  # they do not fit, although all others are left out
                cut = max(0, min(excess, widths[place] - _SHORT))
                widths[place] -= cut
                excess -= cut
    parts = [column.lines(size) for column, size in zip(columns, widths, strict=True)]
    return [_GAP.join(line).rstrip() for line in zip(*parts, strict=True)]


def _one_row(columns: Sequence[_TextColumn], width: int) -> list[str]:
    longest = max(cell_len(column.name) for column in columns)
    room = max(_SHORT, width - longest - len(_GAP))
    return [
        f"{_fitted(column.name, longest)}{_GAP}{shorten(column.cells[0], room)}"
        for column in columns
    ]


def _notes(
    constant: Mapping[str, str], left_out: Sequence[str], how: str, width: int | None
) -> list[str]:
    """Return the lines below the table: what it leaves out, and how to see it."""
    notes: list[str] = []
    same = [f"{k}={shorten(v, _LONGEST)}" for k, v in constant.items() if v and v != BASE]
    if same:
        notes += _wrapped("the same in all rows: ", same, width)
    if empty := [name for name, value in constant.items() if not value]:
        notes += _wrapped("empty: ", empty, width)
    if left_out:
        notes += _wrapped("too wide: ", left_out, width)
        notes.append(f"see {how}")
    return ["", *notes] if notes else []


def _wrapped(head: str, words: Sequence[str], width: int | None) -> list[str]:
    lines = [head]
    for number, word in enumerate(words):
        text = word + ", " * (number < len(words) - 1)
        if width is not None and cell_len(lines[-1] + text.rstrip()) > width and lines[-1] != head:
            lines.append("  ")
        lines[-1] += text
    return [line.rstrip() for line in lines]


def _fitted(text: str, width: int, right: bool = False, by_words: bool = False) -> str:
    text = _first_words(text, width) if by_words else shorten(text, width)
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def _first_words(text: str, width: int) -> str:
    """Return the first words of a text that fit, which end with an ellipsis if others follow."""
    if cell_len(text) <= width:
        return text
    words = text.split()
    while words and cell_len(" ".join([*words, "…"])) > width:
        words.pop()
    return " ".join([*words, "…"])
