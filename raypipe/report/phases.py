"""Phases of a method that end below the phase before them, of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import pandas as pd

from raypipe.report.about import Results
from raypipe.report.formatting import heading
from raypipe.report.headlines import groups_of, headline_rows
from raypipe.report.table_shape import means


def declines(results: Results) -> Iterator[str]:
    """Yield a sentence for each phase that is worse than the one before it.

    Both are of the same group, such as the same documents; repetitions count as their mean.
    """
    table, shape = results.table, results.shape
    if not table.phases:
        return
    axis = table.axes[0]
    for group, rows in groups_of(headline_rows(table, results.rows), shape.groups):
        reached = [phase for phase in table.phases if (rows[axis] == phase).any()]
        worse: dict[tuple[str, str], list[str]] = {}
        for column in shape.numbers:
            if not column.better:
                continue
            sign = -1 if column.better == "lower" else 1
            values = _means(rows, axis, column.name)
            for before, after in pairwise(reached):
                if sign * (values.get(after, 0.0) - values.get(before, 0.0)) < 0:
                    worse.setdefault((before, after), []).append(heading(column.name))
        for (before, after), names in worse.items():
            listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
            where = f" ({group})" if group else ""
            yield f"{after} is worse than {before}, the phase before it, in {listed}{where}."


def _means(rows: pd.DataFrame, axis: str, number: str) -> Mapping[str, float]:
    found = means(rows, [axis], number)
    return dict(zip(found.points[axis], found.mean, strict=True))
