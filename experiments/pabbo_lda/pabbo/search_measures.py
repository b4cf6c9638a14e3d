"""Measures of searches on held-out functions, as the studies use them: regret, area, duels needed.

Functions are the independent units: a function's value is the mean over its starts.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from experiments.pabbo_lda.pabbo.searches import Searches
from raypipe import stats

#: largest regret, as a share of a function's range, that counts as close
TOLERANCES = {"1_percent": 0.01, "5_percent": 0.05}
#: starts of a search: all, and those whose first duel is near to or far from the optimum
STARTS = ("all", "near", "far")
_LOSSES = ("regret", "area", *(f"duels_to_{name}" for name in TOLERANCES))


def duels_to(regret: Tensor, spread: Tensor, tolerance: float) -> Tensor:
    """Return the duels ``[B, R]`` after the first one until the regret is a share of the range.

    Infinite where it never is.
    """
    far = regret > tolerance * spread[:, None, None]
    needed = far.sum(2).double()
    return needed.masked_fill(far[..., -1], torch.inf)


def by_function(searches: Searches, start: str) -> dict[str, pd.DataFrame]:
    """Return functions x methods of each measure; missing without a start of the kind.

    The measures are ``regret`` after the last duel, ``area`` (the mean regret after each duel,
    without the first one) and the ``duels_to_...`` a tolerance, of which one that is never reached
    counts as one more than the duels.
    """
    chosen = _chosen(searches, start)
    count = chosen.sum(1)
    found: dict[str, dict[str, np.ndarray]] = {name: {} for name in _LOSSES}
    for method, values in _by_search(searches).items():
        for name, value in values.items():
            total = value.where(chosen, 0.0).sum(1)
            mean = (total / count).masked_fill(count == 0, torch.nan)
            found[name][method] = mean.numpy()
    return {name: pd.DataFrame(columns) for name, columns in found.items()}


def measure_rows(searches: Searches, control: str) -> list[dict[str, float | int | str | None]]:
    """Return a row per method and kind of start: means, 95 % intervals and paired tests.

    The tests compare each method with ``control`` over functions (Wilcoxon's signed-rank test,
    corrected by Holm for the number of methods).
    """
    rows: list[dict[str, float | int | str | None]] = []
    for start in STARTS:
        chosen = _chosen(searches, start)
        if not chosen.any():
            continue
        tables = by_function(searches, start)
        tested = {name: _p_values(table, control) for name, table in tables.items()}
        for method, regret in searches.regret.items():
            row: dict[str, float | int | str | None] = {
                "start": start,
                "method": method,
                "functions": int(chosen.any(1).sum()),
                "searches": int(chosen.sum()),
            }
            for name in ("regret", "area"):
                values = tables[name][method].dropna()
                half = stats.half_width(values.std(ddof=1), len(values))
                row |= {name: float(values.mean()), f"{name}_half": _known(float(half))}
            for name, share in TOLERANCES.items():
                needed = duels_to(regret, searches.spread, share)[chosen]
                row[f"reached_{name}"] = float(needed.isfinite().double().mean())
                row[f"duels_to_{name}"] = _known(float(needed.quantile(0.5, interpolation="lower")))
            row |= {f"p_{name}": tested[name].get(method) for name in _LOSSES}
            rows.append(row)
    return rows


def _by_search(searches: Searches) -> dict[str, dict[str, Tensor]]:
    """Return the measures ``[B, R]`` of each method."""
    found = {}
    for method, regret in searches.regret.items():
        regret = regret.double()
        most = regret.shape[2]
        found[method] = {"regret": regret[..., -1], "area": regret[..., 1:].mean(2)} | {
            f"duels_to_{name}": duels_to(regret, searches.spread, share).clamp_max(most)
            for name, share in TOLERANCES.items()
        }
    return found


def _chosen(searches: Searches, start: str) -> Tensor:
    """Return which searches ``[B, R]`` have a start of the kind."""
    if start == "all":
        return torch.ones_like(searches.far)
    return searches.far if start == "far" else ~searches.far


def _p_values(values: pd.DataFrame, control: str) -> dict[str, float]:
    """Return the corrected p-value of each method against the control."""
    tests = stats.paired_comparisons(values, control)
    return dict(zip(tests["first"].astype(str), map(float, tests["p_holm"]), strict=True))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
