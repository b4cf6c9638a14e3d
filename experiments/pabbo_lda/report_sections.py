"""The report sections of the topic-number studies: results, figures and statistical tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.pabbo_lda.figures import Tables, figures, runs_of
from experiments.pabbo_lda.settings import LdaSettings
from experiments.pabbo_lda.study.comparison import NOISE
from raypipe import formatting, parts, plots, stats

_SUMMARY = (
    "optimizer", "mean ± std", "on unseen seeds", "median", "min", "max", "best_T_median",
    "evaluations_mean", "duration_s_mean", "runs",
)  # fmt: skip
#: measures that decide, the first one whose ranks are known
_DECISIVE = ("area_under_curve", f"evaluations_to_{NOISE}", "evaluations_to_1_percent")
#: tables that the figures and the tests show
_DRAWN = ("studies", "study_history", "convergence", "evaluations", "landscape")
_TESTS = ("rankings", "comparisons", "against_control")
#: methods of an evaluation in words
_METHODS = {
    "pabbo": "the model of this run", "shipped": "the shipped model", "random": "random search"
}  # fmt: skip
_PAIRS = ("first", "second", "n", "p_value", "p_holm", "effect_size", "conclusion")


def sections(tables: Tables) -> list[parts.Section]:
    """Return results, figures and statistics; a section whose tables are missing has no content."""
    studies = tables.get("convergence", pd.DataFrame())
    return [
        parts.Section(
            "Results",
            _results(tables),
            covers=("summary",),
            findings=[*verdicts(tables), *models(tables)],
            advice=[*_repetitions(tables), *larger_study(studies.to_dict("records"))],
        ),
        parts.Section("Figures", figures(tables), covers=_DRAWN),
        parts.Section("Statistics", _statistics(tables), covers=_TESTS, certainty=_tested(tables)),
    ]


def verdicts(tables: Tables) -> list[str]:
    """Return a sentence on the winner and one on the best T, from the stage ``aggregate``."""
    names = _corpora(tables)
    if len(names) == 1:
        return [text for text in (winner(tables, names[0])[1], _optimum(tables, names[0])) if text]
    won: dict[str, list[str]] = {}
    for name in names:
        won.setdefault(winner(tables, name)[0] or "none", []).append(name)
    winners = ", ".join(f"{name} on {listed(where)}" for name, where in won.items())
    shapes = plots.rows(tables, "landscape")
    optima = [] if shapes is None else [f"T = {row['best_T']:.0f} on {row['dataset']}"
              for row in shapes.dropna(subset="best_T").to_dict("records")]  # fmt: skip
    return [
        *([f"Winner by paired tests with Holm's correction: {winners}."] if names else []),
        *([f"Lowest mean: {', '.join(optima)}."] if optima else []),
    ]


def models(tables: Tables) -> list[str]:
    """Return the mean regret of the run's models, of those that ship and of random search."""
    measures = plots.rows(tables, "measures")
    if measures is None:
        return []
    of_all = measures[measures["start"] == "all"]
    stages = sorted(map(str, of_all["stage"].unique()), reverse=True)  # small before large
    means = of_all.pivot(index="method", columns="stage", values="regret")
    texts = []
    for method, name in _METHODS.items():
        if method in means.index:
            values = means.loc[method, stages].to_numpy(float)
            texts.append(f"{name} {listed([formatting.number(v) for v in plots.finite(values)])}")
    return [f"Mean regret in {listed(stages)}: {', '.join(texts)}."]


def winner(tables: Tables, dataset: str) -> tuple[str, str]:
    """Return the optimizer that the tests put before all others, or empty, and a sentence on it."""
    measure, ranks, pairs = _decisive(tables, dataset)
    if len(ranks) < 2 or pairs.empty:
        return "", ""
    lead = str(ranks.idxmin())
    effects = _decided(pairs, lead)
    beaten = sorted(name for name, effect in effects.items() if effect > 0)
    ahead = sorted(name for name, effect in effects.items() if effect < 0)
    rest = sorted(set(ranks.index) - {lead, *beaten})
    by, runs = formatting.heading(measure), runs_of(int(pairs["n"].max()))
    tests = f"p ≤ {stats.ALPHA:g} in paired tests over {runs}, Holm's correction"
    if not rest:
        sentence = f"{lead} won: its {by} is lower than that of every other optimizer ({tests})."
        return lead, sentence
    leaders = listed(sorted(ranks.index[ranks == ranks.min()].astype(str)))
    leads = f"{leaders} {'has' if leaders == lead else 'have'} the lowest average rank by {by}"
    if ahead:
        found = f"the tests find {listed(ahead)} lower than {lead}"
        return "", f"No winner: {leads}, but {found} ({tests})."
    if beaten:
        chance = f"is more than chance ({tests}), on {listed(rest)} it may be chance."
        return "", f"{leads}; the lead of {lead} on {listed(beaten)} {chance}"
    return "", f"No winner: {leads}, but no test tells {lead} from another optimizer ({tests})."


def _decisive(tables: Tables, dataset: str) -> tuple[str, pd.Series[float], pd.DataFrame]:
    """Return the measure that decides, the average ranks by it, and the tests of all pairs."""
    rankings = _of(tables, "rankings", dataset).dropna(subset="average_rank")
    measure = next((name for name in _DECISIVE if (rankings["measure"] == name).any()), "")
    ranks = rankings[rankings["measure"] == measure].set_index("optimizer")["average_rank"]
    pairs = _of(tables, "comparisons", dataset)
    return measure, ranks, pairs[pairs["measure"] == measure]


def _decided(pairs: pd.DataFrame, lead: str) -> dict[str, float]:
    """Return the effects of the optimizers that the tests tell from ``lead``: > 0 is higher."""
    decided = pairs[pairs["p_holm"].astype(float) <= stats.ALPHA]
    first, second = decided[decided["second"] == lead], decided[decided["first"] == lead]
    return dict(zip(first["first"], first["effect_size"], strict=True)) | dict(
        zip(second["second"], -second["effect_size"], strict=True)
    )


def _optimum(tables: Tables, dataset: str) -> str:
    """Return the best number of topics, if it is inside the range, and its equals by the noise."""
    shape = _of(tables, "landscape", dataset)
    if shape.empty or shape["best_T"].isna().any():
        return ""
    row = shape.iloc[0]
    best, least, most = int(row["best_T"]), int(row["T_least"]), int(row["T_most"])
    place = "inside" if least < best < most else "at the end of"
    lowest = formatting.number(row["best_mean"])
    text = f"The lowest mean, {lowest}, is at T = {best}, {place} the range from {least} to {most}"
    if (low := int(row["T_low"])) < (high := int(row["T_high"])):
        text += f"; T = {low} to {high} are within the noise of it"
    return f"{text} (standard deviation over LDA seeds: {formatting.number(row['std'])})."


def _repetitions(tables: Tables) -> list[str]:
    """Return how many runs the tests of the verdict need to find a difference, if there are fewer.

    Where all optimizers are equal in all runs, no number of runs tells them apart.
    """
    families = (_decisive(tables, name)[2] for name in _corpora(tables))
    short = [
        (stats.runs_needed(len(pairs)), int(pairs["n"].max()))
        for pairs in families
        if not pairs.empty and (pairs["equal"] < pairs["n"]).any()
    ]
    short = [(needed, runs) for needed, runs in short if runs < needed]
    if not short:
        return []
    needed, runs = max(short)
    return [
        f"{runs_of(runs)} cannot tell the optimizers apart: paired tests of all pairs take "
        f"{needed}. Set lda.runs={needed}."
    ]


def larger_study(convergence: Iterable[Mapping[Any, Any]]) -> list[str]:
    """Return which configuration is the study itself, if these studies have fewer repetitions."""
    study, rows = LdaSettings(), list(convergence)
    runs = len({row["run"] for row in rows})
    if not 0 < runs < study.runs:
        return []
    return [
        f"The study itself is configs/pabbo_lda.yaml (raypipe run pabbo_lda): {study.runs} runs "
        f"of {study.evaluations} evaluations; here: {runs} of "
        f"{max(row['evaluations'] for row in rows)}."
    ]


def _results(tables: Tables) -> list[parts.Part]:
    """Return the final values of each data set, the lowest mean in bold."""
    summary = plots.rows(tables, "summary")
    if summary is None:
        return []
    for name, mean, std in (("mean ± std", "mean", "std"),
                            ("on unseen seeds", "confirmed_mean", "confirmed_std")):  # fmt: skip
        if mean in summary and summary[mean].notna().any():
            pairs = zip(summary[mean].astype(float), summary[std].astype(float), strict=True)
            summary = summary.assign(**{name: [formatting.plus_minus(*pair) for pair in pairs]})
    several = len(_corpora(tables)) > 1
    content: list[parts.Part] = ["Lower is better. The lowest mean of each data set is in bold."]
    for dataset, group in summary.groupby("dataset", sort=False):
        group = group.sort_values("mean", kind="stable")
        means = group["mean"].to_numpy(float)
        best = np.isfinite(means) & np.isclose(means, means.min(), rtol=1e-9)
        texts = (winner(tables, str(dataset))[1], _optimum(tables, str(dataset)))
        content += [
            parts.Heading(str(dataset)),
            *(f"{dataset}: {text}" for text in texts if several and text),
            parts.TableView(group, _SUMMARY, f"Results on {dataset}", list(best),
                      caption=_lowest(tables, group[best])),
        ]  # fmt: skip
    return content


def _lowest(tables: Tables, best: pd.DataFrame) -> str:
    """Return the lowest mean of a data set, and the optimizers that the tests may call as good."""
    if best.empty:
        return "Lowest mean: no finite value."
    leaders, count = list(best["optimizer"]), int(best["runs"].max())
    value = best["mean ± std"].iloc[0]
    text = f"Lowest mean: {value} by {' and '.join(leaders)}, {runs_of(count)}."
    pairs = _of(tables, "comparisons", str(best["dataset"].iloc[0]))
    pairs = pairs[pairs["measure"] == "final_value"]
    names = {*pairs["first"].astype(str), *pairs["second"].astype(str)} - {*leaders}
    effects = [_decided(pairs, lead) for lead in leaders]
    others = sorted(name for name in names if not all(each.get(name, 0) > 0 for each in effects))
    if others:
        text += f" This names no winner: no paired test tells it from {listed(others)}."
    return text


def _tested(tables: Tables) -> list[str]:
    """Return how many pairs of optimizers the tests tell apart."""
    pairs = plots.rows(tables, "comparisons")
    if pairs is None or not (tested := pairs["p_holm"].astype(float).notna().sum()):
        return []
    found = int((pairs["p_holm"].astype(float) <= stats.ALPHA).sum())
    return [
        f"Of {tested} paired tests of two optimizers (all measures, Holm's correction), "
        f"{found or 'none'} {'finds' if found < 2 else 'find'} a difference."
    ]


def _statistics(tables: Tables) -> list[parts.Part]:
    """Return the tests of each data set and measure."""
    ranks, *families = (plots.rows(tables, name) for name in _TESTS)
    content: list[parts.Part] = []
    for (dataset, measure), group in () if ranks is None else ranks.groupby(["dataset", "measure"]):
        content += [
            parts.Heading(f"{dataset}: {formatting.heading(str(measure))}"),
            _ranking(group),
        ]
        for table in families:
            if table is not None:
                own = (table["dataset"] == dataset) & (table["measure"] == measure)
                content += _pairs(table[own])
    return content


def _ranking(ranking: pd.DataFrame) -> parts.TableView:
    """Return the average ranks with Friedman's test in words."""
    first = ranking.iloc[0]
    words = f"{str(first['conclusion']).capitalize()}."
    if np.isfinite(float(first["p_value"])):
        words += f" Friedman χ² = {formatting.number(float(first['chi2']))}, "
        words += f"p {formatting.probability(float(first['p_value']))}, "
        words += f"Kendall's W = {formatting.number(float(first['kendalls_w']))}."
    ranked = ranking.sort_values("average_rank", kind="stable")
    return parts.TableView(ranked, ["optimizer", "average_rank"], "Average ranks", caption=words)


def findings(pairs: pd.DataFrame) -> list[str]:
    """Return the conclusions of the pairwise tests of one data set and measure."""
    significant = pairs["p_holm"].astype(float) <= stats.ALPHA
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


def _pairs(pairs: pd.DataFrame) -> list[parts.Part]:
    """Return the conclusions of the pairwise tests, and all tests to open."""
    if pairs.empty:
        return []
    control = pairs["second"].unique()
    family = f"All {len(pairs)} pairs" if len(control) > 1 else f"Each against {control[0]}"
    title = f"{family}: Wilcoxon signed-rank tests with Holm's correction"
    conclusions = pd.DataFrame({family: findings(pairs)})
    return [
        parts.TableView(conclusions, [family], family),
        parts.Fold(title, [parts.TableView(pairs, _PAIRS, "Pairwise comparisons")]),
    ]


def _corpora(tables: Tables) -> list[str]:
    """Return the names of the corpora with ranks."""
    rankings = plots.rows(tables, "rankings")
    return [] if rankings is None else [str(name) for name in rankings["dataset"].unique()]


def _of(tables: Tables, name: str, dataset: str) -> pd.DataFrame:
    """Return the rows of one corpus, none if there is no such table."""
    table = plots.rows(tables, name)
    if table is None:
        columns = ("measure", "optimizer", "average_rank", "equal", "n", "best_T", *_PAIRS)
        return pd.DataFrame(columns=columns)
    return table[table["dataset"].astype(str) == dataset]


def listed(names: Sequence[str]) -> str:
    """Return names as a list in words."""
    *first, last = names or [""]
    return " and ".join(filter(None, [", ".join(first), last]))
