"""Names and strokes of the optimizers and models, the same in every figure."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from raypipe.report.plots import Stroke, strokes

NAMES = {
    "ga": "GA",
    "es": "ES",
    "pabbo_small": "PABBO small",
    "pabbo_large": "PABBO large",
    "sabbo": "SABBO",
    "random": "random",
    "tpe": "TPE",
    "golden_section": "golden section",
    "pabbo_curves": "PABBO curves",
    "bisect": "bisection",
    "gp_ei": "GP with EI",
    "pfn_ei": "PFN with EI",
    "cma_es": "CMA-ES",
    "shipped": "shipped model",
    "preferential_gp": "preferential GP",
}
#: place of axes with room on the right for names and values
LABELED = (0.13, 0.155, 0.5, 0.76)


def strokes_of(present: Sequence[str]) -> dict[str, Stroke]:
    """Return the stroke of each optimizer, the same for every selection of optimizers."""
    return strokes([*NAMES, *sorted(set(present) - set(NAMES))])


def by_optimizer(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame, Stroke]]:
    """Return the optimizers of a table in the fixed order, each with its rows and its stroke."""
    groups = {str(name): group for name, group in table.groupby("optimizer", sort=True)}
    fixed = strokes_of(list(groups))
    return [(name, groups[name], fixed[name]) for name in fixed if name in groups]


def name_of(optimizer: str) -> str:
    """Return the name of an optimizer in figures."""
    return NAMES.get(optimizer, optimizer.replace("_", " "))


def runs_of(count: int) -> str:
    """Return a number of runs in words."""
    return "1 run" if count == 1 else f"{count} runs"
