"""Layout of a table for a terminal, which never cuts a value: texts wrap, columns are left out.

Columns for which the terminal is too narrow are named below the table. A single row becomes a line
per column. Without a terminal every column is one line wide.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
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

Cells = Mapping[str, Sequence[str]]
Sizes = Mapping[str, int]


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
    if isinstance(rows, pa.Table):
        values = rows.to_pydict()
        measures = better(rows.schema)
    else:  # as a table of Arrow it would import pandas
        values = {name: [row.get(name) for row in rows] for name in (rows[0] if rows else ())}
        measures = {}
    if not len(rows):
        return f"(no rows; columns: {', '.join(values)})"
    cells = {name: [*map(cell, column)] for name, column in values.items()}
    if not whole:  # else without columns that say nothing
        nothing = {name: {"", BASE} if name == VARIANT.name else {""} for name in cells}
        known = [n for n in cells if n not in _HIDDEN and {*cells[n]} - nothing[n]]
        cells = {name: cells[name] for name in known or [*cells][:1]}
    names, numbers = [*cells], {name for name in cells if _is_number(values[name])}
    widest = {name: max(map(cell_len, (name, *cells[name]))) for name in names}
    shown = names
    if width is None:
        lines = _plain(names, cells, widest, numbers)
    elif len(rows) == 1 and _total(widest.values()) > width:
        longest = max(map(cell_len, names))
        lines = [f"{name:{longest}}  {cells[name][0]}" for name in names]
    else:
        # texts that repeat, such as that of a method, tell rows apart
        kinds = [n for n in names if n not in numbers and 1 < len({*cells[n]}) < len(rows)]
        first = [*(first or [names[0], *kinds, *measures])]
        ranked = sorted(names, key=lambda name: [*first, name].index(name))
        least = {name: max(map(cell_len, (name, *" ".join(cells[name]).split()))) for name in names}
        shown = []
        for place, name in enumerate(ranked):
            fits = _total(least[each] for each in (*shown, name)) <= width
            if place < kept or (fits and (whole or widest[name] <= _LONGEST)):
                shown.append(name)
        shown.sort(key=names.index)
        if _total(widest[name] for name in shown) <= width:
            lines = _plain(shown, cells, widest, numbers)
        else:
            lines = _wrapping(shown, cells, widest, least, numbers, width)
    if left_out := [name for name in names if name not in shown]:
        texts = f"too wide: {', '.join(left_out)}", f"see {how}"
        lines += ["", *(wrapped(text, width) for text in texts)]
    return "\n".join(lines)


def wrapped(text: str, width: int | None, indent: int = 2) -> str:
    """Return a text in lines of a width, which are never cut inside a word."""
    if width is None:
        return text
    below = " " * indent
    return fill(
        text, width, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )


def cell(value: Any) -> str:
    """Return a value as a reader sees it: six digits, seconds of times, one line of texts."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return printable(" ".join(without_credentials(str(value)).split()))


def _total(sizes: Iterable[int]) -> int:
    """Return the characters of a line with columns of these sizes."""
    return sum(size + _GAP for size in sizes) - _GAP


def _is_number(values: Iterable[Any]) -> bool:
    """Whether values are numbers, apart from missing ones."""
    kinds = {*map(type, values)} - {type(None)}
    return bool(kinds) and kinds <= {int, float}


def _plain(names: Sequence[str], cells: Cells, widest: Sizes, numbers: Container[str]) -> list[str]:
    """Return a line per row, however long; rich would need a second for a thousand rows."""
    parts = []
    for name in names:
        padded = [(text, " " * (widest[name] - cell_len(text))) for text in (name, *cells[name])]
        is_number = name in numbers
        parts.append([space + text if is_number else text + space for text, space in padded])
    return [(" " * _GAP).join(line).rstrip() for line in zip(*parts, strict=True)]


def _wrapping(
    names: Sequence[str],
    cells: Cells,
    widest: Sizes,
    least: Sizes,
    numbers: Container[str],
    width: int,
) -> list[str]:
    """Return rows whose texts wrap between words; the columns with the most room are narrowed."""
    sizes = {name: widest[name] for name in names}
    for _ in range(_total(sizes.values()) - width):
        name = max(names, key=lambda each: sizes[each] - least[each])
        sizes[name] = max(least[name], sizes[name] - 1)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="")
    for name in names:
        justify: JustifyMethod = "right" if name in numbers else "left"
        table.add_column(Text(name), width=sizes[name], justify=justify, overflow="fold")
    for row in zip(*(cells[name] for name in names), strict=True):
        table.add_row(*map(Text, row))
    output = StringIO()
    Console(file=output, width=_total(sizes.values()), color_system=None).print(table)
    return [line.rstrip() for line in output.getvalue().splitlines()]
