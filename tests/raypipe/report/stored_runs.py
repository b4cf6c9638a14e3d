"""Stored runs: their tables and declarations, as JSON beside the text of their pages."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd

from raypipe.graph.tables import CORE
from raypipe.report.results import Declarations, RunResults
from raypipe.store.tables import Column, Table, by_name
from raypipe.study.tables import TABLES
from raypipe.training.tables import with_metrics

FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))
METRICS = (Column("eval_regret", "real", "Regret.", "m", "lower"),)
CORE_TABLES = by_name(with_metrics((*CORE, *TABLES), METRICS))


def stored_run(name: str) -> RunResults:
    """Return a run that is stored here."""
    stored = json.loads((FOLDER / f"{name}.json").read_text())
    declared = [
        Table(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
              | {"columns": tuple(Column(**column) for column in table["columns"])})
        for table in stored["declared"]
    ]  # fmt: skip
    asked = (lambda: stored["asked"]) if stored["asked"] else None
    return RunResults(
        {name: _table(rows) for name, rows in stored["tables"].items()},
        name,
        stored["command"],
        stored["configuration"],
        Declarations(stored["sentence"], declared, CORE_TABLES, asked),
    )


def _table(rows: object) -> pd.DataFrame:
    frame = pd.read_json(io.StringIO(json.dumps(rows)), orient="split", dtype=False)
    for column in {"at", "started_at"} & {*frame}:
        frame[column] = pd.to_datetime(frame[column], utc=True, format="ISO8601")
    return frame
