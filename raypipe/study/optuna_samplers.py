"""Optuna's distributions and samplers, made for one proposal at a time.

Each proposal has its own sampler, whose seed derives from the seed of the search and the number of
the proposal. It depends on these and on the points so far, not on the memory of a process.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.study import Study

from raypipe.config.axes import AxisSettings
from raypipe.config.search import Sampler

Direction = Literal["minimize", "maximize"]

_SMALLEST_POPULATION, _LARGEST_POPULATION = 4, 50
#: generations of a population in a search
_GENERATIONS = 5


def study_of(directions: Sequence[Direction], sampler: BaseSampler) -> Study:
    """Return a new study in memory, which prints nothing."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(directions=list(directions), sampler=sampler)


def distribution(axis: AxisSettings) -> BaseDistribution:
    """Return the distribution of an axis; the values of a grid are drawn from like a choice."""
    values: Any = axis.grid if axis.grid is not None else axis.choice
    if values is not None:
        return CategoricalDistribution(values)
    if axis.is_integer:
        return IntDistribution(int(axis.low or 0), int(axis.high or 0), log=axis.log)
    return FloatDistribution(float(axis.low or 0), float(axis.high or 0), log=axis.log)


def sampler_for(name: Sampler, seed: int, number: int, trials: int) -> BaseSampler:
    """Return the sampler of a proposal.

    Args:
        name: the kind of sampler.
        seed: the seed of the search.
        number: the number of the proposal, from 0.
        trials: the proposals of the whole search, a fifth of which are a population.

    """
    own = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    population = min(max(trials // _GENERATIONS, _SMALLEST_POPULATION), _LARGEST_POPULATION)
    with warnings.catch_warnings():
        # the interface of some may change: the version of Optuna has an upper bound
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match name:
            case "tpe":
                return optuna.samplers.TPESampler(seed=own, constant_liar=True)
            case "gp":
                return optuna.samplers.GPSampler(seed=own)
            case "random":
                return optuna.samplers.RandomSampler(seed=own)
            case "qmc":  # one sequence, whose elements are the proposals
                return optuna.samplers.QMCSampler(seed=seed, scramble=True)
            case "nsgaii":
                return optuna.samplers.NSGAIISampler(seed=own, population_size=population)
            case "nsgaiii":
                return optuna.samplers.NSGAIIISampler(seed=own, population_size=population)
