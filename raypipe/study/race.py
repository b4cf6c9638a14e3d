"""Race of a matrix: seeds are added to the points that may be best until the statistics decide.

A race follows from the results alone: the next command computes what is missing and comes to the
same decisions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import pandas as pd

from raypipe.config.matrix import SEED, Mode, Point, RaceSettings, point_text
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.report.formatting import number as number_text
from raypipe.report.results import monitors_of
from raypipe.stats import finite_or_none, friedman, paired_comparisons, runs_needed
from raypipe.store.ledger import Ledger, Row
from raypipe.store.tables import Table
from raypipe.study.loop import Outcome, Source
from raypipe.study.metric import Metric, cost, metric_of

#: the place of a point in the matrix, and the number of a seed
Run = tuple[int, int]


def eliminate(costs: pd.DataFrame, alpha: float) -> tuple[str, float, pd.DataFrame]:
    """Test which algorithms are worse than the best one, as in a round of F-Race.

    The best has the lowest average rank over the runs, then the lowest mean. With three algorithms
    or more, Friedman's test comes first: without a difference among all of them none is worse. Then
    each is compared with the best (:func:`paired_comparisons`, corrected by Holm).

    The procedure is that of Birattari et al. 2002, "A Racing Algorithm for Configuring
    Metaheuristics", with the signed-rank test of irace in place of their t-test on ranks. As there,
    ``alpha`` holds for one round.

    Args:
        costs: runs x algorithms, without missing values; lower is better.
        alpha: the level of significance.

    Returns:
        the best; the p-value of Friedman's test, NaN with fewer than three algorithms; and a row
        for each other one, with ``is_worse`` and ``p_holm``, which is NaN if Friedman's test found
        no difference.

    Raises:
        ValueError: a column is not numeric, or two have the same name.

    """
    order = pd.DataFrame({"rank": costs.rank(axis=1).mean(), "mean": costs.mean()})
    best = str(order.sort_values(["rank", "mean"], kind="stable").index[0])
    p_friedman = friedman(costs)["p_value"]
    pairs = paired_comparisons(costs, control=best).set_index("first")
    if p_friedman > alpha:
        pairs = pairs.assign(p_holm=math.nan)
    is_worse = (pairs["p_holm"] <= alpha) & (pairs["effect"] > 0)
    return best, p_friedman, pairs.assign(is_worse=is_worse)


class Standing(NamedTuple):
    """The state of a race: its rounds so far, and the runs that the next round needs.

    ``verdict`` says how the race ended; empty while it goes on.
    """

    rows: Sequence[Row]
    due: Sequence[Run]
    verdict: str = ""


def first_runs(settings: RaceSettings, points: int) -> int:
    """Return the seeds of the first round: the fewest that can drop a point."""
    return min(runs_needed(points - 1, settings.alpha), settings.most_runs)


def standing(
    names: Sequence[str], results: Mapping[Run, float | None], settings: RaceSettings, mode: Mode
) -> Standing:
    """Return the state of a race from the results so far.

    Args:
        names: the points.
        results: the metric of each run that has ended; None if it failed.
        settings: the section of the configuration.
        mode: whether the metric is minimized or maximized.

    """
    contenders, rows, is_decided = list(range(len(names))), list[Row](), False
    for number, runs in enumerate(count(first_runs(settings, len(names))), 1):
        due = [(place, run) for run in range(runs) for place in contenders]
        if missing := [each for each in due if each not in results]:
            return Standing(rows, missing)
        table = pd.DataFrame(
            {str(p): [results[p, run] for run in range(runs)] for p in contenders}, dtype=float
        )
        whole = table.dropna(axis="columns")
        best, p_friedman, pairs = "", math.nan, pd.DataFrame({"p_holm": [], "is_worse": []})
        if not whole.empty:
            best, p_friedman, pairs = eliminate(cost(whole, mode), settings.alpha)
        worse = [int(str(name)) for name, is_worse in pairs["is_worse"].items() if is_worse]
        status = dict.fromkeys(contenders, "contender")
        status |= {place: "failed" for place in contenders if str(place) not in whole}
        status |= dict.fromkeys(worse, "dropped")
        is_decided = is_decided or bool(worse)
        contenders = [place for place in contenders if status[place] == "contender"]
        verdict = ""
        match contenders:
            case []:
                verdict = "every point failed"
            case [last] if is_decided:
                status[last] = "winner"
                verdict = f"{names[last]} wins with {runs} seeds"
            case [last]:
                verdict = f"only {names[last]} is left: the other points failed"
            case _ if runs >= settings.most_runs:
                verdict = f"undecided between {len(contenders)} points with {runs} seeds; "
                verdict += f"{names[int(best)]} is ahead"
        rows += [
            {
                "round": number,
                "place": place,
                "runs": runs,
                "mean": finite_or_none(table[str(place)].mean(skipna=False)),
                "status": of_place,
                "p_holm": finite_or_none(pairs["p_holm"].get(str(place))),
                "p_friedman": finite_or_none(p_friedman),
            }
            for place, of_place in status.items()
        ]
        if verdict:
            return Standing(rows, (), verdict)
    raise AssertionError


class Race(Source):
    """The runs of a race.

    Args:
        settings: the section of the configuration.
        metric: what decides.
        points: the points of the matrix.

    """

    table = "race"

    def __init__(self, settings: RaceSettings, metric: Metric, points: Sequence[Point]) -> None:
        first, most = first_runs(settings, len(points)), settings.most_runs
        text = f"race: {len(points)} points, {first} to {most} seeds each"
        super().__init__(points, text, is_compared=True)
        self._settings, self.metrics = settings, [metric]
        self.varied = list(dict.fromkeys(key for point in points for key in point))
        self._names = [point_text(point) for point in points]
        self._results: dict[Run, float | None] = {}
        self._asked: set[Run] = set()
        self._state = standing(self._names, {}, settings, metric.mode)

    @property
    def is_over(self) -> bool:
        """Whether the race is decided, or cannot be with the allowed seeds."""
        return bool(self._state.verdict)

    def ask(self) -> list[Run]:
        """Return the runs that the next decision needs and that were not returned before."""
        due = [run for run in self._state.due if run not in self._asked]
        self._asked.update(due)
        return due

    def points(self, asked: Run) -> Iterable[Point]:
        """Return the point of a run."""
        place, run = asked
        return ({**self._points[place], SEED: run},)

    def expected(self) -> Iterator[Point]:
        """Yield every point with as many seeds as are allowed."""
        for run in range(self._settings.most_runs):
            yield from ({**point, SEED: run} for point in self._points)

    def tell(self, asked: Run, outcome: Outcome) -> str:
        """Record the outcome of a run; return what the round decided, if it is complete."""
        (metric,) = self.metrics
        self._results[asked] = finite_or_none(outcome.measured.get(metric.name))
        if not all(run in self._results for run in self._state.due):
            return ""
        before = len(self._state.rows)
        self._state = standing(self._names, self._results, self._settings, metric.mode)
        lines, new = [], self._state.rows[before:]
        for row in new:
            if row["status"] in ("dropped", "failed"):
                mean = "" if row["mean"] is None else f", mean {number_text(row['mean'])}"
                lines.append(f"race: {self._names[row['place']]} {row['status']}{mean}")
        last = new[-1]
        left = [row["status"] for row in new].count("contender")
        verdict = self._state.verdict or f"{left} points left"
        lines.append(f"race: round {last['round']}, {last['runs']} seeds: {verdict}")
        return "\n".join(lines)

    def rows(self) -> Mapping[str, Row]:
        """Return the rows of all rounds so far."""
        found = {}
        for row in self._state.rows:
            shown = dict(row)
            point = json.dumps(self._points[shown.pop("place")])
            found[f"{row['round']:06}/{point}"] = {**shown, "point": point}
        return found


def race_of(
    configuration: Configuration,
    settings: RaceSettings,
    tables: Mapping[str, Table],
    points: Sequence[Point],
) -> Callable[[Ledger | None], Race]:
    """Return what makes the race of a matrix; it follows from the results alone.

    Raises:
        ConfigError: a table or column that does not exist, or too few points or seeds.

    """
    where = f"{configuration.origin}: matrix.race"
    metric = metric_of(settings, tables, where, monitors_of(configuration.settings.model_dump()))
    if len(points) < 2:
        raise ConfigError(f"{where}: the matrix has {len(points)} point; a race needs two or more")
    least = runs_needed(1, settings.alpha)
    if settings.most_runs < least:
        raise ConfigError(
            f"{where}.most_runs = {settings.most_runs}: with fewer than {least} seeds no test can "
            f"reach alpha = {settings.alpha:g}; raise it"
        )
    return lambda _: Race(settings, metric, points)
