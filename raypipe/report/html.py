"""Small pieces of the page: tables, status marks, figures as inline SVG. All text is escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

import pandas as pd

from raypipe.report.formatting import cell, heading
from raypipe.report.plots import GRID, INK, MUTED, PAPER, Figure

_TONES = {
    "succeeded": "good",
    "failed": "bad",
    "out_of_memory": "bad",
    "interrupted": "warn",
}
_COLOURS = {PAPER: "--paper", INK: "--ink", MUTED: "--muted", GRID: "--grid"}


def status_mark(status: str, tone: str | None = None) -> str:
    """The status in a coloured pill; the word itself carries the meaning."""
    tone = _TONES.get(status, "") if tone is None else tone
    return f'<span class="pill {tone}">{escape(status.replace("_", " "))}</span>'


def section(identifier: str, title: str, body: str, kind: str = "") -> str:
    """A section of the page with its heading."""
    css = f' class="{kind}"' if kind else ""
    return (
        f'<section id="{identifier}"{css} aria-labelledby="{identifier}-title">\n'
        f'<h2 id="{identifier}-title">{escape(title)}</h2>\n{body}\n</section>'
    )


def fold(title: str, body: str) -> str:
    """Content behind a line that opens it."""
    return f"<details><summary>{escape(title)}</summary>\n{body}\n</details>"


def facts_list(facts: Mapping[str, str]) -> str:
    """Names and values side by side."""
    pairs = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{"".join(pairs)}</dl>'


def html_table(
    frame: pd.DataFrame,
    columns: Sequence[str],
    label: str,
    *,
    cells: Mapping[str, Sequence[str]] | None = None,
    emphasised: Sequence[bool] | None = None,
) -> str:
    """The columns that the frame has and that are not empty, as a table; the first names the row.

    ``cells`` gives the HTML of a column that needs more than text, whose name is also its class;
    every other value is formatted by its column's name and escaped. ``emphasised`` marks rows.
    """
    cells = cells or {}
    shown = [c for c in columns if c in cells or (c in frame.columns and frame[c].notna().any())]
    if frame.empty or not shown:
        return ""
    kinds = {c: c if c in cells else _kind(c, frame[c]) for c in shown}
    head = "".join(f'<th scope="col"{_css(kinds[c])}>{escape(heading(c))}</th>' for c in shown)
    body = []
    for i in range(len(frame)):
        row = []
        for place, column in enumerate(shown):
            if column in cells:
                content = cells[column][i]
            else:
                content = escape(cell(column, frame[column].iloc[i]))
            css = _css(kinds[column])
            row.append(
                f'<th scope="row"{css}>{content}</th>' if place == 0 else f"<td{css}>{content}</td>"
            )
        first = ' class="first"' if emphasised is not None and emphasised[i] else ""
        body.append(f"<tr{first}>{''.join(row)}</tr>")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def _kind(name: str, column: pd.Series[str]) -> str:
    """The class of a column: numbers right, long texts wrapped."""
    if "±" in name:
        return "number"
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        return "number"
    return "text" if column.astype(str).str.len().max() > 40 else ""


def _css(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def inline_figure(figure: Figure, svg: bytes, title: str, *, caption: bool = True) -> str:
    """The figure under a title, its SVG inline and in the page's colours.

    Without ``caption`` the caption is left to the page; it stays the picture's alternative text.
    """
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, count=1, flags=re.DOTALL)
    # One name space for the page: ids get the figure's name in front.
    name = re.sub(r"[^A-Za-z0-9]+", "-", figure.name) + "-"
    text = re.sub(r'\bid="', f'id="{name}', text)
    text = text.replace('xlink:href="#', f'href="#{name}').replace("xlink:href=", "href=")
    text = text.replace("url(#", f"url(#{name}")
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, f"var({variable})")
    text = text.replace("'DejaVu Sans'", "var(--sans)")
    box = re.search(r'viewBox="[^"]*"', text)
    opening = f'<svg {box[0] if box else ""} role="img" aria-label="{escape(title)}. '
    opening += f'{escape(figure.caption)}">'
    text = re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)
    below = f"\n<figcaption>{escape(figure.caption)}</figcaption>" if caption else ""
    return f"<figure>\n<h4>{escape(title)}</h4>\n{text.strip()}{below}\n</figure>"
