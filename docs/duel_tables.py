"""Tables of the benchmark of duels, from the results of ``benchmarks/duels.py``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from raypipe.report.formatting import probability
from raypipe.stats import half_width, paired_comparisons

_RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "duels"
_NAMES = {
    "random": "random search",
    "gp_improvement": "preferential GP, expected improvement",
    "gp_best_option": "preferential GP, expected utility of the best option",
    "small_best": "PABBO small, best score",
    "small_drawn": "PABBO small, drawn",
    "large_best": "PABBO large, best score",
    "large_drawn": "PABBO large, drawn",
}
_VARIANTS = {
    "base": "our recipe",
    "published_gradient": "published policy gradient",
    "burn_in": "burn-in of 40 % instead of 60 %",
    "learning_rates": "published learning rates, 1e-3 and 3e-5",
    "splits": "31 prediction splits instead of 4",
    "batch": "burn-in batch 16, policy batch 8 x 10",
}
_CONTROLS = {"random": "random search", "gp_improvement": "the preferential GP"}
_Row = dict[str, Any]


def search_lines() -> Iterator[str]:
    """Yield the measures of all methods, and their tests against random search and the GP."""
    rows = json.loads((_RESULTS / "measures.json").read_text(encoding="utf-8"))["rows"]
    every = [row for row in rows if row["start"] == "all"]
    yield from _table(
        ("method", "regret at the end", "area", "within 5 %", "duels to 5 %", "within 1 %",
         "duels to 1 %", "CPU time per search"),
        ([*_values(row), f"{row['cpu_s']:.2g} s"] for row in every),
    )  # fmt: skip
    for control, name in _CONTROLS.items():
        yield ""
        yield f"Difference to {name}, with Wilcoxon's test over functions:"
        yield ""
        yield from _table(
            ("method", "regret at the end", "area", "duels to 5 %", "duels to 1 %"),
            (_tests(row, control) for row in every if row["method"] != control),
        )


def start_lines() -> Iterator[str]:
    """Yield the measures from near and from far starts."""
    rows = json.loads((_RESULTS / "measures.json").read_text(encoding="utf-8"))["rows"]
    for start in ("near", "far"):
        of = [row for row in rows if row["start"] == start]
        if start == "far":
            yield ""
        yield f"From {start} starts ({of[0]['searches']} searches, {of[0]['functions']} functions):"
        yield ""
        yield from _table(
            ("method", "regret at the end", "area", "within 5 %", "duels to 5 %",
             "area minus random's", "area minus the GP's"),
            ([*_values(row)[:5], *(_test(row, control, "area") for control in _CONTROLS)]
             for row in of),
        )  # fmt: skip


def ablation_lines() -> Iterator[str]:
    """Yield the regrets of the variants of the recipe, and their differences to ours."""
    found = {
        name: json.loads((_RESULTS / f"ablation-{name}.json").read_text(encoding="utf-8"))
        for name in _VARIANTS
    }
    columns = [(mode, measure) for mode in ("drawn", "best") for measure in ("regret", "area")]
    values = {
        (mode, measure): pd.DataFrame({name: of[mode][measure] for name, of in found.items()})
        for mode, measure in columns
    }
    pairs = {key: paired_comparisons(table, "base") for key, table in values.items()}
    cells = []
    for name, text in _VARIANTS.items():
        row = [text, f"{found[name]['cpu_s']:.0f} s"]
        for key in columns:
            table = values[key]
            row.append(f"{table[name].mean():.4f}{_compared(table, pairs[key], name)}")
        cells.append(row)
    header = ("recipe", "CPU time", "drawn: regret at the end", "drawn: area",
              "best score: regret at the end", "best score: area")  # fmt: skip
    yield from _table(header, cells)


def _compared(values: pd.DataFrame, pairs: pd.DataFrame, name: str) -> str:
    """Return the difference of a variant to the recipe, in parentheses; nothing for the recipe."""
    if name == "base":
        return ""
    gap = values[name] - values["base"]
    pair = pairs[pairs["first"] == name].iloc[0]
    half = float(half_width(gap.std(ddof=1), len(gap)))
    return f" ({_difference(gap.mean(), half, pair['p_holm'], pair['conclusion'], name)})"


def _values(row: _Row) -> list[str]:
    """Return a method's name, its means with intervals, and how soon it came close."""
    cells = [_NAMES[row["method"]]]
    cells += [f"{row[key]:.4f} ± {row[f'{key}_half']:.4f}" for key in ("regret", "area")]
    for key in ("5_percent", "1_percent"):
        duels = row[f"duels_to_{key}"]
        cells += [f"{row[f'reached_{key}']:.0%}", "not reached" if duels is None else f"{duels:g}"]
    return cells


def _tests(row: _Row, control: str) -> list[str]:
    measures = ("regret", "area", "duels_to_5_percent", "duels_to_1_percent")
    return [_NAMES[row["method"]], *(_test(row, control, each) for each in measures)]


def _test(row: _Row, control: str, measure: str) -> str:
    if row["method"] == control:
        return ""
    t = row["against"][control][measure]
    return _difference(t["difference"], t["half"], t["p_holm"], t["conclusion"], row["method"])


def _difference(mean: float, half: float, p: float, conclusion: str, name: str) -> str:
    """Return a difference, and whether the test calls the method lower or higher."""
    verdict = "level"
    if conclusion.endswith("is lower"):
        verdict = "lower" if conclusion.startswith(f"{name} ") else "higher"
    digits = 4 if half < 0.1 else 2
    return f"{mean:+.{digits}f} ± {half:.{digits}f}, {verdict}, p {probability(p)}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(header)
    yield f"| {' | '.join(names)} |"
    yield f"|---|{'---:|' * (len(names) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
