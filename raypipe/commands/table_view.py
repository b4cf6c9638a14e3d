"""Layout of a table for a terminal, which never cuts a value: texts wrap, columns are left out.

Columns with one value are named below the table, and so are those for which the terminal is too
narrow. A single row becomes a line per column. Without a terminal every column is one line wide.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from io import StringIO
from textwrap import fill
from typing import Any

import pyarrow as pa
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from raypipe.redaction import printable, without_credentials
from raypipe.store.run_directory import BASE
from raypipe.store.tables import COMMAND_ID, RUN_ID, VARIANT, better

#: columns whose values say nothing to a reader
_HIDDEN = (RUN_ID.name, COMMAND_ID.name)
#: characters between columns, and of a cell above which its column needs to be asked for
_GAP, _LONGEST = 2, 240


@dataclass(frozen=True)
class _TextColumn:
    """A column as it is shown; a number is at the right."""

    name: str
    cells: Sequence[str]
    is_number: bool

    @cached_property
    def widest(self) -> int:
        return max(map(cell_len, (self.name, *self.cells)))

    @cached_property
    def least(self) -> int:
        """The width in which every word is whole."""
        words = (word for text in self.cells for word in text.split())
        return max(map(cell_len, (self.name, *words)))


def terminal_width() -> int | None:
    """Return the columns of the terminal, or $COLUMNS; None for a pipe or a file."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return max(20, shutil.get_terminal_size().columns)
    return None


def view(
    rows: pa.Table | Sequence[Mapping[str, Any]],
    width: int | None,
    *,
    whole: bool = False,
    first: Sequence[str] = (),
    kept: int = 1,
    how: str = "them with --columns NAME,NAME, or everything with --csv or --json",
) -> str:
    """Return a table as text.

    Args:
        rows: the table.
        width: characters of a line at most; None for any.
        whole: whether the columns were chosen: none is left out for what it holds.
        first: the columns that matter most; by default the table's first one and its measures.
        kept: how many of them are never left out.
        how: how to see what is left out.

    """
    if not isinstance(rows, pa.Table):
        rows = pa.Table.from_pylist(list(rows))
    if not len(rows):
        return f"(no rows; columns: {', '.join(rows.column_names)})"
    hidden = [] if whole else [name for name in _HIDDEN if name in rows.column_names]
    rows = rows.drop_columns(hidden)
    columns = [_column(rows, name) for name in rows.column_names]
    same: dict[str, str] = {}
    if not whole:
        columns, same = _without_constant(columns, len(rows))
    if len(rows) == 1 and width is not None and _total(columns) > width:
        widest = max(cell_len(column.name) for column in columns)
        text = [f"{column.name:{widest}}  {column.cells[0]}" for column in columns]
        shown, left_out = columns, list[_TextColumn]()
    else:
        first = first or [*rows.column_names[:1], *better(rows.schema)]
        shown, left_out = _fitting(columns, width, first, kept, whole=whole)
        text = [_plain(shown)] if width is None else [_rich(shown, width)]
    notes = []
    if values := [f"{name}={value}" for name, value in same.items() if value and value != BASE]:
        notes.append(f"the same in all rows: {', '.join(values)}")
    if empty := [name for name, value in same.items() if not value]:
        notes.append(f"empty: {', '.join(empty)}")
    if left_out:
        names = ", ".join(column.name for column in left_out)
        notes.append(f"too wide: {names}")
        notes.append(f"see {how}")
    notes = [wrapped(note, width) for note in notes]
    return "\n".join([*text, *([""] if notes else []), *notes])


def wrapped(text: str, width: int | None, hanging: str = "  ") -> str:
    """Return a text in lines of a width, which are never cut inside a word."""
    if width is None:
        return text
    return fill(
        text, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


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


def _column(rows: pa.Table, name: str) -> _TextColumn:
    kind = rows.schema.field(name).type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return _TextColumn(name, [cell(value) for value in rows[name].to_pylist()], is_number)


def _without_constant(
    columns: Sequence[_TextColumn], rows: int
) -> tuple[list[_TextColumn], dict[str, str]]:
    """Return the columns that say something of a row, and the values of the others."""
    constant: dict[str, str] = {}
    for column in columns:
        values = set(column.cells)
        is_base = column.name == VARIANT.name and values == {BASE}
        if values == {""} or is_base or (rows > 1 and len(values) == 1):
            constant[column.name] = column.cells[0]
    varying = [column for column in columns if column.name not in constant] or [*columns[:1]]
    return varying, {k: v for k, v in constant.items() if k not in {c.name for c in varying}}


def _total(columns: Sequence[_TextColumn], *, least: bool = False) -> int:
    widths = (column.least if least else column.widest for column in columns)
    return sum(widths) + _GAP * (len(columns) - 1)


def _fitting(
    columns: Sequence[_TextColumn],
    width: int | None,
    first: Sequence[str],
    kept: int,
    *,
    whole: bool,
) -> tuple[list[_TextColumn], list[_TextColumn]]:
    """Return the columns that fit, those that matter most before the others, and the rest."""
    if width is None:
        return list(columns), []
    ranks = {name: place for place, name in enumerate(first)}
    ranked = sorted(columns, key=lambda column: ranks.get(column.name, len(first)))
    chosen: list[_TextColumn] = []
    for place, column in enumerate(ranked):
        is_kept = place < kept
        is_long = not whole and column.widest > _LONGEST
        if is_kept or (not is_long and _total([*chosen, column], least=True) <= width):
            chosen.append(column)
    names = {column.name for column in chosen}
    return [c for c in columns if c.name in names], [c for c in columns if c.name not in names]


def _plain(columns: Sequence[_TextColumn]) -> str:
    parts = []
    for column in columns:
        texts = (column.name, *column.cells)
        spaces = (" " * (column.widest - cell_len(text)) for text in texts)
        pairs = zip(texts, spaces, strict=True)
        parts.append([s + t if column.is_number else t + s for t, s in pairs])
    return "\n".join((" " * _GAP).join(line).rstrip() for line in zip(*parts, strict=True))


def _rich(columns: Sequence[_TextColumn], width: int) -> str:
    """Return columns in which texts wrap between words; the widest columns become narrower."""
    widths = [column.widest for column in columns]
    for _ in range(_total(columns) - width):
        room = [size - column.least for size, column in zip(widths, columns, strict=True)]
        if max(room) > 0:
            widths[room.index(max(room))] -= 1
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="")
    for column, size in zip(columns, widths, strict=True):
        justify: JustifyMethod = "right" if column.is_number else "left"
        table.add_column(Text(column.name), width=size, justify=justify, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    output = StringIO()
    console = Console(file=output, width=max(width, _total(columns, least=True)), color_system=None)
    console.print(table)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())
