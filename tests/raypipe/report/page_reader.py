"""A strict reader of the report's page, the page of tables alone, and a plot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from raypipe import report
from raypipe.graph.tables import CORE
from raypipe.report.page import page_files
from raypipe.report.plots import Plot, style
from raypipe.report.results import Declarations, RunResults
from raypipe.store.tables import Column, Table, by_name
from raypipe.study.tables import TABLES
from raypipe.training.tables import with_metrics

METRICS = (
    Column("eval_loss", "real", "Loss.", better="lower"),
    Column("eval_accuracy", "real", "Accuracy.", better="higher"),
    Column("eval_regret", "real", "Regret.", "m", "lower"),
)
CORE_TABLES = by_name(with_metrics((*CORE, *TABLES), METRICS))
HOSTILE = '<script>alert("x")</script>&"\'$'
VOID = {"meta", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A strict reader: every element closed in order; what it holds, by kind."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = text
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.scripts.append(data)
        elif "style" not in self.open:
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def only_own_script(self) -> bool:
        """Whether the page runs its own script and no other one."""
        own = Path(str(report.__file__)).parent / "templates/page.js"
        return self.scripts == [own.read_text(encoding="utf-8").removesuffix("\n")]

    @property
    def headings(self) -> list[str]:
        return [str(attrs["id"]) for attrs in self.all("section")]


def plot_of(name: str = "curve", caption: str = "It bends.", group: str = "") -> Plot:
    """Return a plot of 4 x 3 inches with its caption as title."""
    with style():
        figure = Figure(figsize=(4, 3))
        axes = figure.add_subplot()
        axes.plot([0, 1, 2], [3, 1, 2], color="#e8265e", clip_on=True)
        axes.scatter([1], [2], rasterized=True)
        axes.set_title(caption)
    return Plot(name, f"title of {name}", caption, figure, group)


def run_of(stored: Mapping[str, Any], title: str = "toy") -> RunResults:
    """A run as JSON or YAML has it: its tables and their declarations, and the units asked for."""
    declared = [
        Table(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
              | {"columns": tuple(Column(**column) for column in table["columns"])})
        for table in stored["declared"]
    ]  # fmt: skip
    asked = (lambda: stored["asked"]) if stored["asked"] else None
    return RunResults(
        {name: pd.DataFrame(rows) for name, rows in stored["tables"].items()},
        title,
        stored["command"],
        stored["configuration"],
        Declarations(stored["sentence"], declared, CORE_TABLES, asked),
    )


def page_of(run: RunResults) -> Page:
    """Return the page of a run."""
    return Page(page_files(run)["index.html"].decode())
