"""Output of a sweep's recommendation: on the terminal, and as a configuration file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from raypipe.commands.table_view import cell, terminal_width, view
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.stats import finite_or_none
from raypipe.store.ledger import Ledger, Row
from raypipe.study.recommendation import medians, snippet
from raypipe.study.sweep_settings import SWEEP

#: trials that the terminal shows
_MOST_ROWS = 12


def points_table(rows: Iterable[Row], metric: str, mode: str) -> str:
    """Return a table of the points of a sweep for the terminal, the best first."""
    sign = -1 if mode == "max" else 1

    def cost(row: Row) -> float:
        value = finite_or_none(row.get(metric))
        return math.inf if value is None else sign * value

    swept = [{**row, "point": row.get("point") or {}} for row in sorted(medians(rows), key=cost)]
    keys = list(dict.fromkeys(key for row in swept for key in row["point"]))
    lasts = [key.rpartition(".")[2] for key in keys]
    names = {
        key: last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)
    }
    lines = [
        {
            **{names[key]: cell(row["point"].get(key)) for key in keys},
            metric: finite_or_none(row.get(metric)),
            "status": row["status"],
        }
        for row in swept[:_MOST_ROWS]
    ]
    more = len(swept) - len(lines)
    text = view(pa.Table.from_pylist(lines), terminal_width(), whole=True)
    return f"{text}\n... and {more} more in the table trials" if more else text


def print_recommendation(
    file: str | os.PathLike[str] | None, configuration: Configuration, ledger: Ledger
) -> None:
    """Print the sweep's recommendation; write it as a configuration to a file, if one is given."""
    settings = configuration.settings.sweep
    row = ledger.get("recommendations", settings.stage)
    if row is None:
        print("nothing is recommended; the table trials has the outcome of each point", flush=True)
        return
    rows = [each for each in ledger.rows("trials") if each.get("trained_stage") == settings.stage]
    print(points_table(rows, row["metric"], row["mode"]), flush=True)
    print(snippet(row["settings"], row["reason"]), flush=True)
    if file is not None:
        chosen = {**row["settings"], f"{settings.stage}.from_sweep": False, SWEEP: None}
        text = snippet(configuration.with_values(chosen, "the sweep").resolved(), row["reason"])
        try:
            Path(file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write {file}: cannot be written: {error}") from error
