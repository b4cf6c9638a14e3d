"""Optimisers of T, and of the two priors beside it, by ask and tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from experiments.pabbo_lda.optimizers.evolution import EvolutionStrategy
from experiments.pabbo_lda.optimizers.genetic import GeneticAlgorithm
from experiments.pabbo_lda.optimizers.golden_section import GoldenSection
from experiments.pabbo_lda.optimizers.pabbo import PABBO, PolicySettings, Scorer, model_scorer
from experiments.pabbo_lda.optimizers.pabbo_curves import CurvePABBO
from experiments.pabbo_lda.optimizers.random_search import RandomSearch, RandomTopics
from experiments.pabbo_lda.optimizers.sabbo import SABBO
from experiments.pabbo_lda.optimizers.space import IntegerRange, Point, Space
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

#: these search T alone, its priors being 1/T
T_ONLY: frozenset[OptimizerName] = frozenset(
    {"pabbo_small", "pabbo_large", "pabbo_curves", "golden_section"}
)

__all__ = [
    "T_ONLY",
    "IntegerRange",
    "Optimizer",
    "OptimizerName",
    "Point",
    "PolicySettings",
    "Scorer",
    "Space",
    "make_optimizer",
    "model_scorer",
]


class Optimizer(Protocol):
    """A minimiser of a function of the points of a space.

    Deterministic by its seed, with a generator of its own; a value that is not finite counts as
    the worst. It is told the start values before it is first asked.
    """

    def ask(self) -> list[Point]:
        """The next batch of points, known ones possibly among them; empty once it has finished."""

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """The values of the start, or of the batch asked last, in the order asked."""


def make_optimizer(
    name: OptimizerName,
    *,
    space: Space,
    seed: int,
    scorer: Scorer | None = None,
    pabbo: PolicySettings | None = None,
) -> Optimizer:
    """A fresh optimiser of the points of a space.

    Args:
        name: one of the names of the configuration.
        space: what it searches; PABBO takes its scale of T from its own settings.
        seed: of everything it draws.
        scorer: the trained model, for the three of PABBO only.
        pabbo: how ``pabbo_small`` and ``pabbo_large`` use it; their defaults if None.

    Raises:
        ValueError: for an unknown name, PABBO without a scorer, or priors to be searched by an
            optimiser of T alone.

    """
    if name in T_ONLY and space.priors:
        raise ValueError(
            f"{name} searches T alone, not {' and '.join(space.priors)}: "
            f"leave their ranges away, or use another optimiser than {', '.join(sorted(T_ONLY))}"
        )
    match name:
        case "ga":
            return GeneticAlgorithm(space, seed)
        case "es":
            return EvolutionStrategy(space, seed)
        case "pabbo_small" | "pabbo_large":
            if scorer is None:
                raise ValueError(f"{name} needs the scorer of a trained model")
            settings = pabbo or PolicySettings()
            topics = IntegerRange(space.t_min, space.t_max, settings.scale)
            return PABBO(topics, seed, scorer, settings)
        case "pabbo_curves":
            if scorer is None:
                raise ValueError(f"{name} needs the scorer of a trained model")
            return CurvePABBO(space.topics, seed, scorer)
        case "sabbo":
            return SABBO(space, seed)
        case "random":
            return RandomSearch(space, seed) if space.priors else RandomTopics(space.topics, seed)
        case "tpe":
            return TPE(space, seed)
        case "golden_section":
            return GoldenSection(space.topics)
        case _:
            raise ValueError(
                f"no optimiser {name!r}; there are {', '.join(get_args(OptimizerName))}"
            )
