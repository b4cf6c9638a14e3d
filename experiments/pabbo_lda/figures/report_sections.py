"""The report sections of the topic-number studies: results, figures and statistical tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from experiments.pabbo_lda.figures.report_figures import figures, landscapes
from experiments.pabbo_lda.figures.verdict import details, listed, repetitions, undecided, verdicts
from raypipe.report.formatting import heading, number, plus_minus, probability
from raypipe.report.plots import rows
from raypipe.report.sections import Fold, Heading, Part, Section, TableView
from raypipe.stats import ALPHA

Tables = Mapping[str, pd.DataFrame]

_SUMMARY = (
    "optimizer", "mean ± std", "on unseen seeds", "median", "min", "max", "best_T_median",
    "evaluations_mean", "duration_s_mean", "runs",
)  # fmt: skip
#: lower limit of ``lda.t_min``
_FEWEST = 2
#: tables that the figures and the tests show
_DRAWN = (
    *("studies", "study_history", "anytime", "convergence", "regret", "evaluations"),
    "landscape",
)
_TESTS = ("rankings", "comparisons", "against_control", "across_corpora")
_PAIRS = ("first", "second", "n", "p_value", "p_holm", "effect_size", "conclusion")


def sections(tables: Tables) -> list[Section]:
    """Return results, figures and statistics; a section whose tables are missing has no parts."""
    shapes = landscapes(tables)
    several = len(shapes) > 1
    return [
        Section(
            "Results",
            _results(tables),
            covers=("summary",),
            findings=[*verdicts(tables), *([] if several else shapes)],
            advice=[*_edges(tables), *repetitions(tables)][:1],
        ),
        Section("Figures", [*(shapes if several else []), *figures(tables)], covers=_DRAWN),
        Section(
            "Statistics",
            [*_by_dataset(tables), *_across_corpora(tables)],
            covers=_TESTS,
            certainty=_tested(tables),
        ),
    ]


def _results(tables: Tables) -> list[Part]:
    """Return the final values of each data set, the lowest mean in bold."""
    summary = rows(tables, "summary")
    if summary is None:
        return []
    pairs = zip(summary["mean"].astype(float), summary["std"].astype(float), strict=True)
    summary = summary.assign(**{"mean ± std": [plus_minus(mean, std) for mean, std in pairs]})
    if "confirmed_mean" in summary and summary["confirmed_mean"].notna().any():
        pairs = zip(summary["confirmed_mean"], summary["confirmed_std"], strict=True)
        summary["on unseen seeds"] = [plus_minus(float(mean), float(std)) for mean, std in pairs]
    parts: list[Part] = ["Lower is better. The lowest mean of each data set is in bold."]
    for dataset, group in summary.groupby("dataset", sort=False):
        group = group.sort_values("mean", kind="stable")
        means = group["mean"].to_numpy(float)
        best = np.isfinite(means) & np.isclose(means, means.min(), rtol=1e-9)
        others = undecided(tables, str(dataset), list(group["optimizer"][best]))
        lowest = _lowest(group[best], others)
        parts += [
            Heading(str(dataset)),
            *details(tables, str(dataset)),
            TableView(group, _SUMMARY, f"Results on {dataset}", list(best), caption=lowest),
        ]
    return parts


def _edges(tables: Tables) -> list[Part]:
    """Return what to try for each data set whose best T is at an end of the range."""
    summary = rows(tables, "summary")
    names = [] if summary is None else list(summary["dataset"].astype(str).unique())
    several = len(names) > 1
    return [
        f"{name}: {part}" if several else part for name in names for part in _edge(tables, name)
    ]


def _tested(tables: Tables) -> list[str]:
    """Return how many pairs of optimizers the tests tell apart."""
    pairs = rows(tables, "comparisons")
    if pairs is None:
        return []
    tested = pairs["p_holm"].astype(float).notna().sum()
    found = int((pairs["p_holm"].astype(float) <= ALPHA).sum())
    return (
        [
            f"Of {tested} paired tests of two optimizers (all measures, Holm's correction), "
            f"{found or 'none'} {'finds' if found < 2 else 'find'} a difference."
        ]
        if tested
        else []
    )


def _edge(tables: Tables, dataset: str) -> list[Part]:
    """Return what to try if the best T of a data set is the smallest or largest that was tried.

    The best one is that of the mean over seeds if it is known, as in the figure of the objective.
    """
    history = rows(tables, "study_history")
    if history is None:
        return []
    tried = history[history["dataset"] == dataset]
    known = tried[np.isfinite(tried["value"].astype(float))]
    if known.empty or tried["T"].nunique() < 2:
        return []
    least, most = int(tried["T"].min()), int(tried["T"].max())
    best = int(known.sort_values("value", kind="stable")["T"].iloc[0])
    shapes = rows(tables, "landscape")
    if shapes is not None:
        means = shapes.loc[shapes["dataset"] == dataset, "best_T"].dropna()
        best = int(means.iloc[0]) if len(means) else best
    if best == least == _FEWEST:
        return [
            f"The best T is {best}, the fewest topics that a search can have, so every optimizer "
            "searches for the edge. Another corpus, vocabulary (data.options) or measure may have "
            "its best T inside."
        ]
    if best == least:
        return [f"The best T is {best}, the smallest that was tried: try a smaller lda.t_min."]
    if best == most:
        return [f"The best T is {best}, the largest that was tried: try a larger lda.t_max."]
    return []


def _lowest(best: pd.DataFrame, others: Sequence[str]) -> str:
    """Return the lowest mean of a data set, and the optimizers that may be as good."""
    if best.empty:
        return "Lowest mean: no finite value."
    runs = int(best["runs"].max())
    names = " and ".join(map(str, best["optimizer"]))
    text = f"Lowest mean: {best['mean ± std'].iloc[0]} by {names}, {runs} run{'s' * (runs > 1)}."
    if others:
        text += f" This names no winner: no paired test tells it from {listed(others)}."
    return text


def _by_dataset(tables: Tables) -> list[Part]:
    """Return the tests of each data set and measure."""
    keys = ["dataset", "measure"]
    texts: dict[tuple[str, str], list[Part]] = {}
    for name, write in (
        ("rankings", _ranking),
        ("comparisons", _pairs),
        ("against_control", _pairs),
    ):
        table = rows(tables, name)
        if table is not None:
            for (dataset, measure), group in table.groupby(keys, sort=False):
                texts.setdefault((str(dataset), str(measure)), []).extend(write(group))
    parts: list[Part] = []
    for (dataset, measure), found in sorted(texts.items(), key=lambda item: item[0][0]):
        parts += [Heading(f"{dataset}: {heading(measure)}"), *found]
    return parts


def _across_corpora(tables: Tables) -> list[Part]:
    """Return the ranks of the optimizers over all data sets."""
    columns = ["measure", "optimizer", "corpora", "average_rank", "wins", "kendalls_w"]
    across = rows(tables, "across_corpora")
    if across is None:
        return []
    across = across.sort_values(["measure", "average_rank"], kind="stable")
    across = across.assign(measure=[heading(str(measure)) for measure in across["measure"]])
    words = " ".join(_sentence(str(text)) for text in across["conclusion"].unique())
    view = TableView(across, [*columns, "p_value"], "Across corpora")
    return [Heading("Across corpora"), words, view]


def _ranking(ranking: pd.DataFrame) -> list[Part]:
    """Return the average ranks with Friedman's test in words."""
    first = ranking.iloc[0]
    words = " ".join(_sentence(str(text)) for text in ranking["conclusion"].dropna().unique())
    if np.isfinite(float(first["p_value"])):
        words += f" Friedman χ² = {number(float(first['chi2']))}, "
        words += f"p {probability(float(first['p_value']))}, "
        words += f"Kendall's W = {number(float(first['kendalls_w']))}."
    ranked = ranking.sort_values("average_rank", kind="stable")
    return [TableView(ranked, ["optimizer", "average_rank"], "Average ranks", caption=words)]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def findings(pairs: pd.DataFrame) -> list[str]:
    """Return the conclusions of the pairwise tests of one data set and measure."""
    significant = pairs["p_holm"].astype(float) <= ALPHA
    texts = []
    for conclusion, group in pairs.groupby("conclusion", sort=False):
        text = str(conclusion)
        if significant[group.index].all():
            couples = zip(group["first"], group["second"], strict=True)
            others = [str(b) if text.startswith(f"{a} ") else str(a) for a, b in couples]
            texts.append(f"{text} (against {', '.join(others)})")
        else:
            texts.append(f"{text} ({len(group)} {'pair' if len(group) == 1 else 'pairs'})")
    return texts


def _pairs(pairs: pd.DataFrame) -> Sequence[Part]:
    """Return the conclusions of the pairwise tests, and all tests to open."""
    control = pairs["second"].unique()
    family = f"All {len(pairs)} pairs" if len(control) > 1 else f"Each against {control[0]}"
    count = int((pairs["p_holm"].astype(float) <= ALPHA).sum())
    title = f"{family}: Wilcoxon signed-rank tests with Holm's correction, {count} with p ≤ {ALPHA}"
    conclusions = pd.DataFrame({family.partition(":")[0]: findings(pairs)})
    return [
        TableView(conclusions, list(conclusions.columns), family),
        Fold(title, [TableView(pairs, _PAIRS, "Pairwise comparisons")]),
    ]
