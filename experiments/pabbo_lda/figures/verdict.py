"""Sentences of the report: the winner if there is one, its lead, and the best T."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from experiments.pabbo_lda.figures.optimizer_styles import runs_of
from experiments.pabbo_lda.study.aggregation import CONTROL
from experiments.pabbo_lda.study.convergence import NOISE
from raypipe import stats
from raypipe.report.formatting import heading, number
from raypipe.report.plots import rows

Tables = Mapping[str, pd.DataFrame]

#: measures that decide, the first one whose ranks are known
_DECISIVE = ("area_under_curve", f"evaluations_to_{NOISE}", "evaluations_to_1_percent")
_NEEDED = ("dataset", "measure", "first", "second", "n", "p_holm", "effect_size")


def verdicts(tables: Tables) -> list[str]:
    """Return a sentence on the winner and one on the best T, from the stage ``aggregate``."""
    names = corpora(tables)
    if len(names) == 1:
        return [*_winner(tables, names[0]), *_optimum(tables, names[0])]
    won: dict[str, list[str]] = {}
    for name in names:
        won.setdefault(_won(tables, name) or "none", []).append(name)
    winners = ", ".join(f"{name} on {listed(where)}" for name, where in won.items())
    shapes = [_of(tables, "landscape", name).dropna(subset="best_T").head(1) for name in names
              if rows(tables, "landscape") is not None]  # fmt: skip
    optima = [f"T = {row['best_T']:.0f} on {row['dataset']}"
              for shape in shapes for row in shape.to_dict("records")]  # fmt: skip
    return [
        *([f"Winner by paired tests with Holm's correction: {winners}."] if names else []),
        *([f"Lowest mean: {', '.join(optima)}."] if optima else []),
    ]


def details(tables: Tables, dataset: str) -> list[str]:
    """Return what :func:`verdicts` leaves out of a corpus."""
    several = len(corpora(tables)) > 1
    parts = [_winner, _optimum] * several + [_against_control, _confirmed, speed]
    texts = [text for part in parts for text in part(tables, dataset)]
    return [f"{dataset}: {text}" if several else text for text in texts]


def corpora(tables: Tables) -> list[str]:
    """Return the names of the corpora with ranks."""
    rankings = rows(tables, "rankings")
    return [] if rankings is None else [str(name) for name in rankings["dataset"].unique()]


def _won(tables: Tables, dataset: str) -> str:
    """Return the optimizer that the tests put before all others, or empty."""
    _, ranks, pairs = _decisive(tables, dataset)
    if len(ranks) < 2 or pairs.empty:
        return ""
    lead = str(ranks.idxmin())
    return lead if {lead, *_higher(_with(pairs, lead), lead)} == {*ranks.index} else ""


def _winner(tables: Tables, dataset: str) -> Iterator[str]:
    """Yield the optimizer that won, or that the tests name none."""
    measure, ranks, pairs = _decisive(tables, dataset)
    if len(ranks) < 2 or pairs.empty:
        return
    lead = str(ranks.idxmin())
    own = _with(pairs, lead)
    beaten, ahead = _higher(own, lead), _lower(own, lead)
    rest = sorted(set(ranks.index) - {lead, *beaten})
    by, runs = heading(measure), int(own["n"].max())
    tests = f"p ≤ {stats.ALPHA:g} in paired tests over {runs_of(runs)}, Holm's correction"
    leaders = listed(sorted(ranks.index[ranks == ranks.min()].astype(str)))
    leads = f"{leaders} {'has' if leaders == lead else 'have'} the lowest average rank by {by}"
    if not rest:
        yield f"{lead} won: its {by} is lower than that of every other optimizer ({tests})."
    elif ahead:
        found = f"the tests find {listed(ahead)} lower than {lead}"
        yield f"No winner: {leads}, but {found} ({tests})."
    elif beaten:
        yield (
            f"{leads}; the lead of {lead} on {listed(beaten)} is more than chance ({tests}), on "
            f"{listed(rest)} it may be chance."
        )
    else:
        yield f"No winner: {leads}, but no test tells {lead} from another optimizer ({tests})."


def _against_control(tables: Tables, dataset: str) -> Iterator[str]:
    """Yield the optimizers that are better than the control by the tests against it alone."""
    measure, ranks, _ = _decisive(tables, dataset)
    against = _of(tables, "against_control", dataset, _NEEDED)
    winners = _winners(against[against["measure"] == measure])
    if winners and _won(tables, dataset) in ("", CONTROL):
        better = [str(name) for name in ranks.sort_values().index if name in winners]
        yield f"Against {CONTROL} search alone, the tests find {listed(better)} better."


def _decisive(tables: Tables, dataset: str) -> tuple[str, pd.Series[float], pd.DataFrame]:
    """Return the measure that decides, the average ranks by it, and the tests of all pairs."""
    rankings = _of(tables, "rankings", dataset, ["measure", "optimizer", "average_rank"])
    rankings = rankings.dropna(subset="average_rank")
    measure = next((name for name in _DECISIVE if (rankings["measure"] == name).any()), "")
    ranks = rankings[rankings["measure"] == measure].set_index("optimizer")["average_rank"]
    pairs = _of(tables, "comparisons", dataset, _NEEDED)
    return measure, ranks, pairs[pairs["measure"] == measure]


def repetitions(tables: Tables) -> list[str]:
    """Return how many runs the tests of the verdict need to find a difference, if there are fewer.

    Where all optimizers are equal in all runs, no number of runs tells them apart.
    """
    families = [
        pairs for name in corpora(tables) if not (pairs := _decisive(tables, name)[2]).empty
    ]
    short = [
        (stats.runs_needed(len(pairs)), int(pairs["n"].max()))
        for pairs in families
        if "equal" not in pairs or (pairs["equal"] < pairs["n"]).any()
    ]
    short = [(needed, runs) for needed, runs in short if runs < needed]
    if not short:
        return []
    needed, runs = max(short)
    return [
        f"{runs_of(runs)} cannot tell the optimizers apart: paired tests of all pairs take "
        f"{needed}. Set lda.runs={needed}."
    ]


def undecided(tables: Tables, dataset: str, leaders: Sequence[str]) -> list[str]:
    """Return the optimizers whose final values are not higher than all leaders' by the tests."""
    pairs = _of(tables, "comparisons", dataset, _NEEDED)
    pairs = pairs[pairs["measure"] == "final_value"]
    names = {*pairs["first"].astype(str), *pairs["second"].astype(str)} - {*leaders}
    beaten = [_higher(_with(pairs, lead), lead) for lead in leaders]
    return sorted(name for name in names if not all(name in each for each in beaten))


def _with(pairs: pd.DataFrame, name: str) -> pd.DataFrame:
    return pairs[(pairs["first"] == name) | (pairs["second"] == name)]


def _higher(pairs: pd.DataFrame, lead: str) -> list[str]:
    """Return the optimizers that the tests find higher than ``lead``."""
    return sorted(name for name, effect in _decided(pairs, lead) if effect > 0)


def _lower(pairs: pd.DataFrame, lead: str) -> list[str]:
    """Return the optimizers that the tests find lower than ``lead``."""
    return sorted(name for name, effect in _decided(pairs, lead) if effect < 0)


def _decided(pairs: pd.DataFrame, lead: str) -> list[tuple[str, float]]:
    """Return the optimizers that differ from ``lead`` by the tests, with effects: > 0 is higher."""
    decided = pairs[pairs["p_holm"].astype(float) <= stats.ALPHA]
    first = decided["first"] == lead
    names = decided["second"].where(first, decided["first"]).astype(str)
    effects = decided["effect_size"].astype(float)
    return list(zip(names, effects.where(~first, -effects), strict=True))


def _winners(against: pd.DataFrame) -> set[str]:
    """Return the optimizers that are lower than the control."""
    decided = against[against["p_holm"].astype(float) <= stats.ALPHA]
    return set(decided["first"][decided["effect_size"].astype(float) < 0].astype(str))


def speed(tables: Tables, dataset: str) -> Iterator[str]:
    """Yield the median evaluations of each optimizer until it is as near as the noise allows."""
    reached = _of(tables, "convergence", dataset)
    for target, near in ((NOISE, "within the noise"), ("1_percent", "within 1 %")):
        column = f"evaluations_beyond_start_to_{target}"
        if column in reached and reached[column].notna().any():
            needed = reached[column].astype(float).fillna(np.inf).groupby(reached["optimizer"])
            medians = needed.median().sort_values(kind="stable")
            texts = [
                f"{name} {number(n) if np.isfinite(n) else 'never'}" for name, n in medians.items()
            ]
            yield (
                f"Evaluations after the start until {near} of the best value, medians over "
                f"{runs_of(int(needed.size().max()))}: {', '.join(texts)}."
            )
            return


def _confirmed(tables: Tables, dataset: str) -> Iterator[str]:
    """Yield how far the optimizers' best points differ on seeds that no search saw."""
    summary = _of(tables, "summary", dataset)
    if "confirmed_mean" not in summary:
        return
    means = summary.set_index("optimizer")["confirmed_mean"].astype(float)
    means = means[np.isfinite(means)].sort_values(kind="stable")
    if len(means) < 2:
        return
    first, last = (f"{number(means.iloc[at])} ({means.index[at]})" for at in (0, -1))
    pairs = _of(tables, "comparisons", dataset, _NEEDED)
    pairs = pairs[pairs["measure"] == "confirmed_value"]
    decided = int((pairs["p_holm"].astype(float) <= stats.ALPHA).sum())
    found = f"{decided} of {len(pairs)} pairs differ" if decided else "no pair differs"
    yield (
        f"Their best T, on LDA seeds that no search saw, have means from {first} to {last}; "
        f"{found} by more than chance."
    )


def _optimum(tables: Tables, dataset: str) -> Iterator[str]:
    """Yield the best number of topics, if it is inside the range, and its equals by the noise."""
    shape = _of(tables, "landscape", dataset)
    if shape.empty or shape["best_T"].isna().any():
        return
    row = shape.iloc[0]
    best, least, most = int(row["best_T"]), int(row["T_least"]), int(row["T_most"])
    low, high = int(row["T_low"]), int(row["T_high"])
    place = "inside" if least < best < most else "at the end of"
    text = f"The lowest mean, {number(row['best_mean'])}, is at T = {best}, {place} the range "
    text += f"from {least} to {most}"
    if low < high:
        text += f"; T = {low} to {high} are within the noise of it"
    yield f"{text} (standard deviation over LDA seeds: {number(row['std'])})."


def _of(tables: Tables, name: str, dataset: str, columns: Sequence[str] = ()) -> pd.DataFrame:
    """Return the rows of one corpus, none if there is no such table."""
    table = rows(tables, name)
    return (
        pd.DataFrame(columns=["dataset", *columns])
        if table is None
        else table[table["dataset"].astype(str) == dataset]
    )


def listed(names: Sequence[str]) -> str:
    """Return names as a list in words."""
    *first, last = names or [""]
    return " and ".join(filter(None, [", ".join(first), last]))
