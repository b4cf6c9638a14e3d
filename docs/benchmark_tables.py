"""Leaderboard of the benchmark on topic-number search, from its stored studies."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd

from benchmarks.topics.leaderboard import CONTROL, STUDIES, leaderboard, medians


def leaderboard_lines() -> Iterator[str]:
    """Yield the leaderboard as a table."""
    table = leaderboard(_studies())
    corpora = _studies()["corpus"].nunique()
    yield (
        "| optimizer | average rank | within 1 % | evaluations | area | regret "
        f"| better than `{CONTROL}` | worse |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for row in table.itertuples():
        tests = ["", ""]
        if row.optimizer != CONTROL:
            tests = [f"{count:.0f} of {corpora}" for count in (row.better, row.worse)]
        cells = (
            *(f"`{row.optimizer}`", f"{row.rank:.1f} ± {row.rank_half:.1f}"),
            *(f"{row.reached:.0%}", _median(row.evaluations, ".1f"), f"{row.area:.4f}"),
            *(f"{row.regret:.4f}", *tests),
        )
        yield f"| {' | '.join(cells)} |"


def median_lines() -> Iterator[str]:
    """Yield the median evaluations to within 1 % per corpus and start."""
    table, order = medians(_studies()), leaderboard(_studies())["optimizer"]
    yield f"| corpus | start | {' | '.join(f'`{name}`' for name in order)} |"
    yield f"|---|---|{'---:|' * len(order)}"
    for (corpus, start), row in table[order].iterrows():
        cells = (_median(value, "g") for value in row)
        yield f"| {corpus} | {start} | {' | '.join(cells)} |"


def _median(evaluations: float, style: str) -> str:
    return format(evaluations, style) if math.isfinite(evaluations) else "more"


def _studies() -> pd.DataFrame:
    return pd.read_parquet(STUDIES)
