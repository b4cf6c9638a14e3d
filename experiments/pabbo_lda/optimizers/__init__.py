"""Optimisers of an integer T by ask and tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from experiments.pabbo_lda.optimizers.evolution import EvolutionStrategy
from experiments.pabbo_lda.optimizers.genetic import GeneticAlgorithm
from experiments.pabbo_lda.optimizers.golden_section import GoldenSection
from experiments.pabbo_lda.optimizers.pabbo import PABBO, PolicySettings, Scorer, model_scorer
from experiments.pabbo_lda.optimizers.pabbo_curves import CurvePABBO
from experiments.pabbo_lda.optimizers.random_search import RandomSearch
from experiments.pabbo_lda.optimizers.sabbo import SABBO
from experiments.pabbo_lda.optimizers.space import IntegerRange
from experiments.pabbo_lda.optimizers.tpe import TPE

OptimizerName = Literal[
    "ga",
    "es",
    "pabbo_small",
    "pabbo_large",
    "pabbo_curves",
    "sabbo",
    "random",
    "tpe",
    "golden_section",
]

__all__ = [
    "IntegerRange",
    "Optimizer",
    "OptimizerName",
    "PolicySettings",
    "Scorer",
    "make_optimizer",
    "model_scorer",
]


class Optimizer(Protocol):
    """A minimiser of f(T) over the integers of a range.

    Deterministic by its seed, with a generator of its own; a value that is not finite counts as
    the worst. It is told the start values before it is first asked.
    """

    def ask(self) -> list[int]:
        """The next batch of T, known ones possibly among them; empty once it has finished."""

    def tell(self, points: Sequence[int], values: Sequence[float]) -> None:
        """The values of the start, or of the batch asked last, in the order asked."""


def make_optimizer(
    name: OptimizerName,
    *,
    t_min: int,
    t_max: int,
    seed: int,
    scorer: Scorer | None = None,
    pabbo: PolicySettings | None = None,
) -> Optimizer:
    """A fresh optimiser of T in [t_min, t_max].

    Args:
        name: one of the names of the configuration.
        t_min: the smallest T.
        t_max: the largest T.
        seed: of everything it draws.
        scorer: the trained model, for the three of PABBO only.
        pabbo: how ``pabbo_small`` and ``pabbo_large`` use it; their defaults if None.

    Raises:
        ValueError: for an unknown name, an empty range, or PABBO without a scorer.

    """
    space = IntegerRange(t_min, t_max)
    match name:
        case "ga":
            return GeneticAlgorithm(space, seed)
        case "es":
            return EvolutionStrategy(space, seed)
        case "pabbo_small" | "pabbo_large":
            if scorer is None:
                raise ValueError(f"{name} needs the scorer of a trained model")
            settings = pabbo or PolicySettings()
            return PABBO(IntegerRange(t_min, t_max, settings.scale), seed, scorer, settings)
        case "pabbo_curves":
            if scorer is None:
                raise ValueError(f"{name} needs the scorer of a trained model")
            return CurvePABBO(space, seed, scorer)
        case "sabbo":
            return SABBO(space, seed)
        case "random":
            return RandomSearch(space, seed)
        case "tpe":
            return TPE(space, seed)
        case "golden_section":
            return GoldenSection(space)
        case _:
            raise ValueError(
                f"no optimiser {name!r}; there are {', '.join(get_args(OptimizerName))}"
            )
