"""Rendering of sections as one self-contained HTML page. Jinja2 escapes every text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from numbers import Real
from typing import Any
from urllib.parse import quote, unquote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from raypipe.report.formatting import cell, heading
from raypipe.report.plots import GRID, INK, LINE, MUTED, PAPER, TIP, Plot, encode, slug
from raypipe.report.sections import (
    Answers,
    Bar,
    Code,
    Download,
    Fold,
    Heading,
    Part,
    Pill,
    Section,
    TableView,
    Tiles,
)

_OPTION = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")
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
        "address": _address,
        "unbroken": _unbroken,
        "svg": partial(_svg, files),
    }
    script = environment.get_template("page.js").render()
    page = environment.get_template("page.html").render(
        title=title,
        status=status,
        facts=facts,
        sections=_anchored(sections),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return files | {"index.html": page.encode()}


def _plots(parts: Sequence[Part]) -> Iterator[Plot]:
    for part in parts:
        if isinstance(part, Plot):
            yield part
        elif isinstance(part, Fold):
            yield from _plots(part.parts)
        elif isinstance(part, Answers):
            for _, parts_of_answer in part.answers:
                yield from _plots(parts_of_answer)


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


def _grouped(parts: Sequence[Part]) -> Iterator[Part | list[Plot]]:
    """Yield the visible parts; plots in sequence stand side by side, as a list."""
    for are_plots, members in groupby(_titled(parts), lambda part: isinstance(part, Plot)):
        shown: list[Any] = list(members)
        yield from [shown] if are_plots else shown


def _titled(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield the parts that show anything, and the heading of each group of plots before it.

    A caption that a whole group shares stands there too, once. A single plot has the group in its
    title.
    """
    visible = [part for part in parts if _shows(part)]
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


def _shows(part: Part) -> bool:
    if isinstance(part, TableView):
        return bool(part.visible_columns)
    if isinstance(part, Tiles):
        return bool(part.tiles)
    return not isinstance(part, Answers) or any(parts for _, parts in part.answers)


def _columns(table: TableView) -> list[tuple[str, str, str, list[tuple[Any, str]]]]:
    """Return the CSS class, the heading, the meaning and the cells of each visible column.

    A cell is its content, and the number to sort by or an empty text.
    """
    columns = []
    for name in table.visible_columns:
        values = table.rows[name]
        shown = [v if isinstance(v, Pill | Bar | Code) else cell(name, v) for v in values]
        keys = [f"{float(v)!r}" if _is_real(v) else "" for v in values]
        meaning = table.meanings.get(name, "")
        columns.append(
            (_css(name, values), heading(name), meaning, list(zip(shown, keys, strict=True)))
        )
    return columns


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _unbroken(text: str) -> Markup:
    """Return a text whose options, such as ``--run-dir``, do not break at their hyphens."""
    return Markup(_OPTION.sub(r'<span class="option">\1</span>', str(escape(text))))


def _address(download: Download) -> str:
    """Return a file's content as the address of a link."""
    return "data:text/plain;charset=utf-8," + quote(download.text, safe="")


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
    tips = rf'<g id="{TIP}([^"]*)">'
    text = re.sub(tips, lambda at: f'<g class="tip"><title>{escape(unquote(at[1]))}</title>', text)
    lines = rf'<g id="{LINE}([^"]*)">'
    text = re.sub(lines, lambda at: f'<g class="line" data-line="{escape(unquote(at[1]))}">', text)
    prefix = f"{slug(plot.name)}_"
    text = re.sub(r'\bid="|url\(#|(?<=href=")#', rf"\g<0>{prefix}", text).replace("xlink:", "")
    for color, variable in _COLORS.items():
        text = text.replace(color, f"var({variable})")
    text = text.replace("'DejaVu Sans'", "var(--sans)").strip()
    return re.findall(r'viewBox="([^"]*)"', opening)[0], Markup(text)
