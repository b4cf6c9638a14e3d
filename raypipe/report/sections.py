"""Sections of the report and their parts: plain values that :mod:`raypipe.report.html` renders.

Every text may come from a user or from data: rendering escapes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pandas as pd

from raypipe.report.plots import Plot

_TONES = {"succeeded": "good", "failed": "bad", "out_of_memory": "bad", "interrupted": "warn"}


@dataclass(frozen=True)
class Section:
    """A titled section of the page; it is left out if no part shows anything.

    A text is a paragraph, and plots in sequence stand side by side. ``css`` is the class of the
    section's element. ``covers`` names the results tables that it shows, which then need no
    separate section. The summary also shows ``findings`` on what came out, before all numbers,
    ``certainty``, sentences on how certain the results are, and ``advice`` on what to do next;
    the latter two not of a matrix, of which a section shows one point.
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
class Fold:
    """Parts that a click on the title opens."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class TableView:
    """Columns of a table in order; the first names the row. ``label`` is for screen readers.

    A cell is a :class:`Pill`, :class:`Bar` or :class:`Code`, or any value, which is formatted by
    its column's name. ``emphasized`` says which rows are bold, ``meanings`` explains columns.
    ``caption`` stands above the rows.
    """

    rows: pd.DataFrame
    columns: Sequence[str]
    label: str
    emphasized: Sequence[bool] = ()
    meanings: Mapping[str, str] = field(default_factory=dict)
    caption: str = ""

    @property
    def visible_columns(self) -> list[str]:
        """The columns that the rows have and that hold a value."""
        present = (name for name in self.columns if name in self.rows.columns)
        return [name for name in present if self.rows[name].notna().any()]


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
class Bar:
    """A bar on a timeline; start and length in percent of its width."""

    start: float
    length: float


@dataclass(frozen=True)
class Tile:
    """A headline number: what it is, its value, and a note. Tones are those of a pill."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Tiles:
    """Headline numbers side by side."""

    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Answers:
    """Questions, each with the parts that answer it; those without parts are left out."""

    answers: Sequence[tuple[str, Sequence[Part]]]


@dataclass(frozen=True)
class Download:
    """A link that saves a text as a file."""

    name: str
    text: str


Part: TypeAlias = str | Heading | Code | Fold | TableView | Plot | Pill | Tiles | Answers | Download


def cells(values: Iterable[Any]) -> Any:
    """Return the cells of a column, which need not be plain values, for ``DataFrame.assign``."""
    return list(values)
