"""Stage that compares the variants of a matrix once all of them are done."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import Identity
from raypipe.report.comparison import COSTS, compared
from raypipe.report.measures import monitors_of, training_measures
from raypipe.store.ledger import Row
from raypipe.store.run_directory import BASE

NAME = "compare_variants"


def comparison_stage(stages: Sequence[Stage]) -> Stage:
    """Return the stage that compares all others, which are those of a matrix."""
    needs = {stage.key: stage.fingerprint for stage in stages}
    budgets = {stage.key: [unit.budget for unit in stage.units] for stage in stages}
    identity = Identity.of({"stage": NAME}, {"budgets": budgets}, needs)
    return Stage(
        NAME,
        compare,
        [Unit(NAME, identity=identity)],
        needs=tuple(needs),
        reads=(),
        workload="statistics over seeds",
        always_rerun=True,
        after_failures=True,
    )


def compare(context: StageContext) -> None:
    """Derive the tables of means, tests and best points from the results of all variants."""
    ledger, declared = context.session.ledger, context.session.tables
    names = ("variants", "trials", "measures")
    frames = {name: frame_of(ledger.rows(name)) for name in names}
    columns = {name: declared[name].columns for name in names if name in declared}
    measured = [
        *(("measures", column) for column in columns.get("measures", ())),
        *(
            ("trials", column)
            for column in training_measures(
                frames["trials"].columns,
                columns.get("trials", ()),
                monitors_of(context.session.settings.model_dump()),
            )
        ),
        *(("trials", c) for c in columns.get("trials", ()) if c.name in COSTS),
    ]
    better = {(name, column.name): column.better for name, column in measured if column.better}
    for table, found in compared(frames, better).items():
        rows = _rows(found)
        ledger.remove(table, {key for key, _ in ledger.items(table)} - rows.keys())
        ledger.put(table, rows)


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """Return rows as a table with their variants."""
    frame = pd.DataFrame(rows)
    if len(frame):
        frame["variant"] = frame["variant"].fillna(BASE) if "variant" in frame else BASE
    return frame


def _rows(found: pd.DataFrame) -> dict[str, Row]:
    """Return the rows of a table by their place, without missing values."""
    rows = found.astype(object).where(found.notna(), None).to_dict("records")
    return {f"{place:06}": {str(n): v for n, v in row.items()} for place, row in enumerate(rows)}
