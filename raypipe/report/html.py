"""Rendering of sections as one self-contained HTML page. Jinja2 escapes every text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from raypipe.report.formatting import cell, heading
from raypipe.report.plots import GRID, INK, MUTED, PAPER, Plot, encode, slug
from raypipe.report.sections import Bar, Code, Fold, Heading, Part, Pill, Section, TableView

_COLORS = {PAPER: "--paper", INK: "--ink", MUTED: "--muted", GRID: "--grid"}


def render(
    title: str, status: Pill | None, facts: Mapping[str, str], sections: Sequence[Section]
) -> dict[str, bytes]:
    """Return the files of a report by name: each plot as PNG and SVG, ``index.html`` last.

    ``facts`` stand below the title. Raises ValueError when two plots share a name.
    """
    files: dict[str, bytes] = {}
    for plot in _plots([part for section in sections for part in section.parts]):
        if f"{_path(plot)}.svg" in files:
            raise ValueError(f"two figures are named {plot.name!r}; names must differ")
        files |= {f"{_path(plot)}.{kind}": content for kind, content in encode(plot).items()}
    environment = Environment(
        loader=PackageLoader("raypipe.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": lambda value: type(value).__name__,
        "grouped": _grouped,
        "columns": _columns,
        "svg": partial(_svg, files),
    }
    page = environment.get_template("page.html").render(
        title=title, status=status, facts=facts, sections=_anchored(sections)
    )
    return files | {"index.html": page.encode()}


def _plots(parts: Sequence[Part]) -> Iterator[Plot]:
    for part in parts:
        if isinstance(part, Plot):
            yield part
        elif isinstance(part, Fold):
            yield from _plots(part.parts)


def _path(plot: Plot) -> str:
    return f"figures/{slug(plot.name)}"


def _anchored(sections: Sequence[Section]) -> dict[str, Section]:
    """Return the sections that show anything by unique ids, which follow from their titles."""
    anchored: dict[str, Section] = {}
    for section in sections:
        anchor = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        while anchor in anchored:
            anchor += "-"
        if list(_grouped(section.parts)):
            anchored[anchor] = section
    return anchored


def _grouped(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield the parts, without empty tables, and the heading of each group of plots before it.

    A caption that a whole group shares stands there too, once. A single plot has the group in its
    title.
    """
    visible = [p for p in parts if not isinstance(p, TableView) or p.visible_columns]
    for group, members in groupby(visible, lambda part: getattr(part, "group", "")):
        plots: list[Any] = list(members)
        if group and len(plots) > 1:
            yield Heading(group)
            if len({plot.caption for plot in plots}) == 1:
                yield plots[0].caption
                plots = [replace(plot, caption="") for plot in plots]
        elif group:
            plots = [replace(plots[0], title=f"{group}: {plots[0].title}")]
        yield from plots


def _columns(table: TableView) -> list[tuple[str, str, list[Any]]]:
    """Return the CSS class, the heading and the cells of each visible column."""
    columns = []
    for name in table.visible_columns:
        values = table.rows[name]
        cells = [v if isinstance(v, Pill | Bar | Code) else cell(name, v) for v in values]
        columns.append((_css(name, values), heading(name), cells))
    return columns


def _css(name: str, column: pd.Series[Any]) -> str:
    """Return the class of a column: numbers are right-aligned, long texts wrapped."""
    kinds = {type(value) for value in column}
    if Bar in kinds or Code in kinds:
        return "timeline" if Bar in kinds else "code"
    is_number = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    if is_number or "±" in name:
        return "number"
    return "text" if column.astype(str).str.len().max() > 40 else ""


def _svg(files: Mapping[str, bytes], plot: Plot) -> tuple[str, Markup]:
    """Return the view box and the content of a plot's SVG element, in the page's colors.

    Matplotlib escaped the texts in it. Ids get the plot's name as prefix, unique on the page.
    """
    text = files[f"{_path(plot)}.svg"].decode()
    opening, _, text = text[text.index("<svg") :].rpartition("</svg>")[0].partition(">")
    text = re.sub(r"<(metadata|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    prefix = f"{slug(plot.name)}_"
    text = re.sub(r'\bid="|url\(#|(?<=href=")#', rf"\g<0>{prefix}", text).replace("xlink:", "")
    for color, variable in _COLORS.items():
        text = text.replace(color, f"var({variable})")
    text = text.replace("'DejaVu Sans'", "var(--sans)").strip()
    return re.findall(r'viewBox="([^"]*)"', opening)[0], Markup(text)
