"""Sections of the report, their parts, and their rendering as one self-contained HTML page.

Every text may come from a user or from data: Jinja2 escapes it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from numbers import Real
from typing import Any, TypeAlias
from urllib.parse import unquote

import pandas as pd
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from raypipe.report.formatting import cell, counted, heading
from raypipe.report.plots import BLUE, GRID, INK, MUTED, PAPER, TIP, Plot, encode, slug
from raypipe.store.tables import ADDED

_COLORS = {PAPER: "--paper", INK: "--ink", MUTED: "--muted", GRID: "--grid", BLUE: "--blue"}
_MOST_ROWS, _MOST_PLOTS = 20, 6  # that are not folded
_TONES = {"succeeded": "good", "failed": "bad", "out_of_memory": "bad", "interrupted": "warn"}


@dataclass(frozen=True)
class Section:
    """A titled section of the page; it is left out if no part shows anything.

    A text is a paragraph, and plots in sequence stand side by side. ``css`` is the class of the
    section's element. ``covers`` names the results tables that it shows, which then need no
    separate section. The summary also shows ``findings`` on what came out, before all numbers,
    ``certainty``, sentences on how certain the results are, and ``advice`` on what to do next.
    """

    title: str
    parts: Sequence[Part]
    css: str = ""
    covers: Sequence[str] = ()
    findings: Sequence[Part] = ()
    certainty: Sequence[str] = ()
    advice: Sequence[Part] = ()


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True)
class Code:
    """Preformatted text in a fixed-width font: a block, or a cell of a table."""

    text: str


@dataclass(frozen=True)
class Link:
    """A link to an address that no run has chosen."""

    text: str
    address: str


@dataclass(frozen=True)
class Fold:
    """Parts that a click on the title opens."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class TableView:
    """Columns of a table in order, by default its own; the first names the row.

    ``label`` is for screen readers. A cell is a :class:`Pill`, :class:`Code` or :class:`Link`, or
    any value, which is formatted by its column's name. ``emphasized`` says which rows are bold,
    ``meanings`` explains columns. ``caption`` stands above the rows.
    """

    rows: pd.DataFrame
    columns: Sequence[Any] = ()
    label: str = ""
    emphasized: Sequence[bool] = ()
    meanings: Mapping[str, str] = field(default_factory=dict)
    caption: str = ""

    def __bool__(self) -> bool:
        """Whether it shows anything."""
        return bool(self.visible_columns)

    @property
    def visible_columns(self) -> list[str]:
        """The columns that the rows have and that hold a value; all of them if none does."""
        given = self.columns or own_columns(self.rows)
        present = [name for name in given if name in self.rows.columns]
        held = [name for name in present if self.rows[name].notna().any()]
        return held if held or self.rows.empty else present


@dataclass(frozen=True)
class Image:
    """A picture from elsewhere: its media type and its bytes.

    The page has it as an ``img`` alone, in which a browser runs no script, not even of an SVG.
    """

    title: str
    caption: str
    media_type: str
    content: bytes
    group: str = ""  # as that of plots, with which it stands side by side

    @property
    def source(self) -> str:
        """The picture as a URI."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True)
class Pill:
    """A word on a colored background. Tones: good, warn, bad, or empty."""

    text: str
    tone: str = ""

    @classmethod
    def of_status(cls, status: str) -> Pill:
        """Return the pill of a stage's or trial's status."""
        return cls(status.replace("_", " "), _TONES.get(status, ""))


@dataclass(frozen=True)
class Tile:
    """A headline number: what it is, its value, and a note. Tones are those of a pill."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


#: headline numbers side by side
Tiles: TypeAlias = tuple[Tile, ...]
#: questions, each with the parts that answer it; those without parts are left out
Answers: TypeAlias = dict[str, list["Part"]]
Part: TypeAlias = (
    str | Heading | Code | Link | Fold | TableView | Plot | Image | Pill | Tiles | Answers
)


def own_columns(rows: pd.DataFrame, first: Sequence[str] = ()) -> list[Any]:
    """Return the columns of rows without those that raypipe added, unless they are the first."""
    own: list[Any] = [name for name in rows if name not in ADDED]
    return list(dict.fromkeys([*first, *own]))


def cells(values: Iterable[Any]) -> Any:
    """Return the cells of a column, which need not be plain values, for ``DataFrame.assign``."""
    return list(values)


def render(
    title: str, status: Pill | None, sections: Sequence[Section], about: Sequence[Pill | str] = ()
) -> dict[str, bytes]:
    """Return the files of a report by name: each plot as PNG and SVG, ``index.html`` last.

    ``about`` is what the user says of the run; it is a line below the title.

    Raises ValueError when two plots share a name.
    """
    files: dict[str, bytes] = {}
    shown, environment = anchored(sections), templates()
    page = environment.get_template("page.html").render(
        title=title,
        status=status,
        about=about,
        links={anchor: section.title for anchor, section in shown.items()},
        content=content(shown, partial(_svg, files)),
        policy=policy(environment, "page.js"),
    )
    return files | {"index.html": page.encode()}


def content(sections: Mapping[str, Section], svg: Callable[[Plot], tuple[str, Markup]]) -> Markup:
    """Return sections by their ids as HTML; ``svg`` returns the :func:`drawing` of a plot."""
    return Markup(templates().get_template("sections.html").render(sections=sections, svg=svg))


def policy(environment: Environment, *scripts: str) -> str:
    """Return the policy of a page that loads nothing, and runs no script but these templates."""
    texts = (environment.get_template(name).render().encode() for name in scripts)
    digests = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in texts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"


@cache
def templates(*packages: str) -> Environment:
    """Return the templates of packages and the report's, which a process compiles once."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in (*packages, "raypipe.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": lambda value: type(value).__name__,
        "grouped": _grouped,
        "columns": _columns,
    }
    return environment


def anchored(sections: Sequence[Section]) -> dict[str, Section]:
    """Return the sections that show anything by unique ids, which follow from their titles."""
    found: dict[str, Section] = {}
    for section in sections:
        anchor = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        while anchor in found:
            anchor += "-"
        if list(_grouped(section.parts)):
            found[anchor] = section
    return found


def _grouped(parts: Sequence[Part], is_folded: bool = False) -> Iterator[Part | list[Plot | Image]]:
    """Yield the parts that show anything; plots in sequence stand side by side, as a list.

    A group of plots has a heading before it. Long tables and further plots are folded, unless the
    parts are folded already.
    """
    for group, members in groupby(filter(None, parts), lambda part: getattr(part, "group", None)):
        shown: list[Any] = list(members)
        if group is None:
            for part in shown:
                is_long = isinstance(part, TableView) and len(part.rows) > _MOST_ROWS
                yield Fold(part.label, [part]) if is_long and not is_folded else part
            continue
        yield from [Heading(group)] if group else []
        most = len(shown) if is_folded else _MOST_PLOTS
        yield shown[:most]
        if more := shown[most:]:
            yield Fold(counted(len(more), "more figure"), more)


def _columns(table: TableView) -> list[tuple[str, str, str, list[tuple[Any, str]]]]:
    """Return the CSS class, the heading, the meaning and the cells of each visible column.

    A cell is its content, and the number to sort by or an empty text.
    """
    columns = []
    for name in table.visible_columns:
        values, cells = table.rows[name], []
        for value in values:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            shown = value if isinstance(value, Pill | Code | Link) else cell(name, value)
            cells.append((shown, repr(float(value)) if is_number else ""))
        columns.append((_css(name, values), heading(name), table.meanings.get(name, ""), cells))
    return columns


def _css(name: str, column: pd.Series[Any]) -> str:
    """Return the class of a column: numbers are right-aligned, long texts wrapped."""
    if any(isinstance(value, Code) for value in column):
        return "code"
    is_number = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    if is_number or "±" in name:
        return "number"
    return "text" if column.astype(str).str.len().max() > 40 else ""


def _svg(files: dict[str, bytes], plot: Plot) -> tuple[str, Markup]:
    """Add the files of a plot; return its drawing. Raises ValueError if there is one so named."""
    name, drawn = slug(plot.name), encode(plot)
    if f"figures/{name}.svg" in files:
        raise ValueError(f"two figures are named {plot.name!r}; names must differ")
    files |= {f"figures/{name}.{kind}": content for kind, content in drawn.items()}
    return drawing(plot, drawn["svg"])


def drawing(plot: Plot, content: bytes) -> tuple[str, Markup]:
    """Return the view box and content of a plot's SVG, in the page's colors.

    Matplotlib escaped the texts in it. Ids get the plot's name as prefix, unique on the page.
    """
    name, text = slug(plot.name), content.decode()
    opening, _, text = text[text.index("<svg") :].rpartition("</svg>")[0].partition(">")
    text = re.sub(r"<(metadata|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    tips = rf'<g id="{TIP}([^"]*)">'
    text = re.sub(tips, lambda at: f'<g class="tip"><title>{escape(unquote(at[1]))}</title>', text)
    text = re.sub(r'\bid="|url\(#|(?<=href=")#', rf"\g<0>{name}_", text).replace("xlink:", "")
    for color, variable in _COLORS.items():
        text = text.replace(color, f"var({variable})")
    text = text.replace("'DejaVu Sans'", "var(--sans)").strip()
    return re.findall(r'viewBox="([^"]*)"', opening)[0], Markup(text)
