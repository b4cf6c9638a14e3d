"""Report of a function experiment: its best calls, and the table of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from raypipe.report.sections import Section, TableView
from raypipe.storage.tables import Table


def sections(
    table: Table, tables: Mapping[str, pd.DataFrame], arguments: Sequence[str]
) -> list[Section]:
    """Return the section of the calls; ``arguments`` are the columns that were varied."""
    rows = tables.get(table.name)
    if rows is None or rows.empty:
        return []
    return [Section("Calls", [TableView(rows.head(50), [*arguments, *rows.columns], "Calls")])]
