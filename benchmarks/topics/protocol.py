"""The fixed protocol: corpora, starts, budget, and the measures of one study."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

import numpy as np

from benchmarks.topics.record import RECORDED, T_MAX
from experiments.pabbo_lda.experiment import TRAINED_BY
from experiments.pabbo_lda.objective.objectives import TabularObjective
from experiments.pabbo_lda.optimizers import Optimizer, OptimizerName, make_optimizer
from experiments.pabbo_lda.optimizers.bayesian import SurrogateImprovement
from experiments.pabbo_lda.optimizers.pabbo import PairScorer, model_scorer
from experiments.pabbo_lda.pabbo.model import restore_model, shipped_weights
from experiments.pabbo_lda.settings import START
from experiments.pabbo_lda.space import Space
from experiments.pabbo_lda.study.study import Study
from experiments.pabbo_lda.surrogate.model import restore_surrogate
from experiments.pabbo_lda.surrogate.posterior import Surrogate
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import read_verified

DATA = Path(os.environ.get("RAYPIPE_DATA", "../shared/data"))
PUBLISHED = DATA / "lda_published" / "evaluations.csv.gz"

#: evaluations after the start; a study that ends earlier keeps its best value
BUDGET = 30
#: the T that a user would take is judged after as many
EARLY = 10
#: largest excess over the best recorded value that counts as reaching it
TOLERANCE = 0.01
FIRST_SEED, SEEDS, RUNS = 42, 10, 20

#: starts of a study: the published one, and those drawn for each run from a range of positions
STARTS: dict[str, tuple[int, float, float] | None] = {
    "published": None,
    "spread": (5, -1.0, 1.0),
    "low": (4, -1.0, -0.4),
    "high": (4, 0.4, 1.0),
}


@dataclass(frozen=True)
class Corpus:
    """Recorded values, the range of T, and the mean over LDA seeds of log values at recorded T."""

    name: str
    table: TabularObjective
    t_max: int

    @property
    def seeds(self) -> list[int]:
        """The LDA seeds with values."""
        return [seed for name, seed in self.table.runs if name == self.name]

    def expected(self, T: int) -> float:
        """Return the mean over LDA seeds of the logarithm of the value."""
        values = [self.table.value(self.name, seed, T) for seed in self.seeds]
        return float(np.mean(np.log(values)))

    @cached_property
    def lowest(self) -> float:
        """The smallest expected logarithm on a grid of 500 T."""
        grid = self.space.topics.grid(500)
        return min(self.expected(int(T)) for T in grid)

    @property
    def space(self) -> Space:
        """The range of T that optimizers search."""
        return Space(2, self.t_max)


@cache
def corpora() -> dict[str, Corpus]:
    """Return the corpora by name: the published ones, if present, and those of this project."""
    found: dict[str, Corpus] = {}
    for path, t_max in ((PUBLISHED, 1000), (RECORDED, T_MAX)):
        if path.is_file():
            table = TabularObjective.read(path)
            found |= {name: Corpus(name, table, t_max) for name, _ in table.runs}
    return found


def start_of(name: str, space: Space, run: int) -> list[int]:
    """Return the distinct values of T from which every optimizer starts in a run."""
    drawn = STARTS[name]
    if drawn is None:
        return [T for T in START if T in range(space.t_min, space.t_max + 1)]
    count, low, high = drawn
    rng = np.random.default_rng([run, *map(ord, name)])
    found: dict[int, None] = {}
    while len(found) < count:
        found[int(space.topics.values(rng.uniform(low, high)))] = None
    return list(found)


def study(corpus: str, start: str, optimizer: str, run: int) -> dict[str, float | bool]:
    """Return the measures of one study; lower is better.

    The optimizer sees the values of one LDA seed. Runs beyond the recorded seeds use these again,
    with other starts and another seed of the optimizer.

    Args:
        corpus: a name of :func:`corpora`.
        start: a key of ``STARTS``.
        optimizer: a name of the main job, ``NAME@RUN_DIR`` with the model of a run directory
            instead of the one that ships, or ``module:Class``, called with the space and a seed.
        run: from 0.

    Returns:
        ``evaluations``: after the start, to a value within 1 % of the best recorded one of its
        LDA seed; 31 if there was none, then ``reached`` is False. ``area``: mean over the 30
        evaluations after the start of log(best so far / best recorded). ``regret``: of the best
        T after 10 evaluations, the log of its value above the smallest one, both as means over
        all LDA seeds.

    """
    about = corpora()[corpus]
    table, space, seed = about.table, about.space, FIRST_SEED + run % SEEDS
    points = space.start_points(start_of(start, space, run))
    running = Study(_optimizer(optimizer, space, FIRST_SEED + run), points, len(points) + BUDGET)
    while not running.done:
        for point in running.request():
            running.supply(point, table.value(corpus, seed, point.T))
    best = table.best(corpus, seed)[1]
    rows = running.history[len(points) - 1 :]
    excess = np.log([row.best_value / best for row in rows])
    after = np.append(excess[1:], np.full(BUDGET + 1 - len(excess), excess[-1]))
    close = np.flatnonzero(excess <= math.log1p(TOLERANCE))
    chosen = rows[min(EARLY, len(rows) - 1)].best_point
    assert chosen is not None  # recorded values are finite
    return {
        "evaluations": int(close[0]) if len(close) else BUDGET + 1,
        "reached": len(close) > 0,
        "area": float(after.mean()),
        "regret": max(0.0, about.expected(chosen.T) - about.lowest),
    }


def _optimizer(name: str, space: Space, seed: int) -> Optimizer:
    if ":" in name:
        made: Optimizer = resolve_name(name)(space, seed)
        return made
    known, _, run_dir = name.partition("@")
    if known == "pfn_ei" and run_dir:
        return SurrogateImprovement(space, seed, _surrogate(run_dir))
    scorer = _scorer(known, run_dir) if known in TRAINED_BY else None
    return make_optimizer(cast("OptimizerName", known), space=space, seed=seed, scorer=scorer)


@cache
def _scorer(name: str, run_dir: str) -> PairScorer:
    """Return the model of a run directory, or without one the model that ships."""
    stage = TRAINED_BY[cast("OptimizerName", name)]
    weights = _trained(run_dir, stage) if run_dir else shipped_weights(stage)
    return model_scorer(restore_model(weights))


@cache
def _surrogate(run_dir: str) -> Surrogate:
    return Surrogate(restore_surrogate(_trained(run_dir, "train")))


def _trained(run_dir: str, stage: str) -> bytes:
    run = RunDirectory.at(Path(run_dir))
    return read_verified(run, run.model(stage))
