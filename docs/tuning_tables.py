"""Tables of the tuning benchmark, from the results of ``benchmarks/tuning.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from raypipe.report.formatting import probability
from raypipe.stats import friedman, half_width, paired_comparisons

_RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "tuning"
_NAMES = {
    "pabbo": "`PabboSampler`",
    "gp": "`GPSampler`",
    "tpe": "`TPESampler(multivariate=True)`",
    "cma_es": "`CmaEsSampler`",
    "random": "`RandomSampler`",
}
#: random points that all samplers start from, and the regret of a point that is good enough
_START, _CLOSE = 4, 0.05
#: regret after the start, as a share of a table's range, that is no more than rounding
_ROUNDING = 1e-9
_PROBLEM = ["parameters", "problem", "data"]


def tuning_lines() -> Iterator[str]:
    """Yield the comparison of the samplers: over all problems, and by the number of parameters."""
    files = {name: _RESULTS / f"runs-{name}.parquet" for name in _NAMES}
    runs = [pd.read_parquet(file) for file in files.values() if file.is_file()]
    if not files["pabbo"].is_file():
        yield "(The results follow with the trained weights.)"
        return
    means, solved = measures(pd.concat(runs), pd.read_parquet(_RESULTS / "values.parquet"))
    areas = means["area"][[name for name, file in files.items() if file.is_file()]]
    yield from _comparison(areas, means)
    yield ""
    yield from _by_parameters(areas)
    yield ""
    yield _explanation(areas, solved)


def measures(runs: pd.DataFrame, values: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the means over seeds of each problem (rows) and sampler, and the problems left out.

    The regret of a problem has no unit if each start is at the best value of its table already, and
    no sampler has anything to find there.

    Args:
        runs: the value of each evaluation, with the problem, the sampler and the seed.
        values: the tables of the problems, one row per point.

    """
    tables = values.groupby(["problem", "data"])["value"].agg(lowest="min", highest="max")
    runs = runs.merge(tables.reset_index())
    one = [*_PROBLEM, "sampler", "seed"]
    runs["best"] = (runs.groupby(one)["value"].cummin() - runs["lowest"]).clip(lower=0)
    starts = runs[runs["number"] == _START - 1].groupby(_PROBLEM)
    unit = starts["best"].mean()
    solved = unit <= _ROUNDING * starts[["highest", "lowest"]].first().eval("highest - lowest")
    runs["best"] /= unit[~solved].reindex(pd.MultiIndex.from_frame(runs[_PROBLEM])).to_numpy()
    runs = runs.dropna(subset="best")
    best = runs[runs["number"] >= _START].groupby(one)["best"]
    since_start = runs[runs["number"] >= _START - 1].assign(above=runs["best"] > _CLOSE)
    found = pd.DataFrame(
        {
            "area": best.mean(),
            "evaluations": since_start.groupby(one)["above"].sum(),
            "reached": best.last() <= _CLOSE,
            "last": best.last(),
        }
    )
    names = [f"{problem} ({data})" for _, problem, data in solved[solved].index]
    return found.groupby([*_PROBLEM, "sampler"]).mean().unstack("sampler"), names


def _comparison(areas: pd.DataFrame, means: pd.DataFrame) -> Iterator[str]:
    ranks = friedman(areas.dropna(axis=1))["average_ranks"]
    pairs = paired_comparisons(areas, control="pabbo").set_index("first")
    yield (
        "| sampler | problems | area | within 5 % | evaluations to 5 % | regret at the end "
        "| mean rank | area above PABBO's (95 %) | PABBO lower on | p (Holm) |"
    )
    yield f"|---|{'---:|' * 9}"
    for name in map(str, areas):
        cells = [
            _NAMES[name],
            str(areas[name].count()),
            f"{areas[name].mean():.3f}",
            f"{means['reached'][name].mean():.0%}",
            f"{means['evaluations'][name].mean():.1f}",
            f"{means['last'][name].mean():.3f}",
            f"{ranks[name]:.2f}" if name in ranks else "",
        ]
        if name == "pabbo":
            cells += ["", "", ""]
        else:
            gaps = (areas[name] - areas["pabbo"]).dropna()
            half = float(half_width(gaps.std(ddof=1), len(gaps)))
            cells += [
                f"{gaps.mean():+.3f} ± {half:.3f}",
                f"{int((gaps > 0).sum())} of {len(gaps)}",
                probability(float(pairs["p_holm"][name])),
            ]
        yield f"| {' | '.join(cells)} |"


def _by_parameters(areas: pd.DataFrame) -> Iterator[str]:
    means = areas.groupby("parameters").mean()
    counts = areas.groupby("parameters").size()
    yield f"| parameters | problems | {' | '.join(f'area of {_NAMES[n]}' for n in areas)} |"
    yield f"|---:|---:|{'---:|' * len(areas.columns)}"
    for number, row in means.iterrows():
        cells = ("" if pd.isna(value) else f"{value:.3f}" for value in row)
        yield f"| {number} | {counts[number]} | {' | '.join(cells)} |"


def _explanation(areas: pd.DataFrame, solved: list[str]) -> str:
    pairs = paired_comparisons(areas, control="pabbo")
    said = zip(pairs["first"], pairs["conclusion"], strict=True)
    verdict = "; ".join(f"against {_NAMES[name]}: {text}" for name, text in said)
    left_out = (
        f"Left out, since every start is at the best value of the table already: "
        f"{'; '.join(solved)}. "
        if solved
        else ""
    )
    return (
        "Regret is the distance of the best value so far to the smallest one of the table, in "
        "units of its mean after the start: 1 if nothing better is found, 0 at the best point. The "
        "area is its mean over the evaluations after the start. Within 5 % is the share of "
        "searches with a regret of at most 0.05 at the end. Evaluations to 5 % are their "
        "number after the start until this regret; a search that does not reach it counts 22. Each "
        "problem counts once, with the mean over ten seeds. The p-values are those of the paired "
        "Wilcoxon test over problems, corrected by Holm; ranks are over the samplers that took "
        "part in all problems. "
        f"{left_out}Conclusions about the area, {verdict}."
    )
