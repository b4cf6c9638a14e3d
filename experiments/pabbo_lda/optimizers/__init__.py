"""Optimizers of the number of topics T, and of the two priors, with an ask-and-tell interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from experiments.pabbo_lda.optimizers.bisection import Bisection
from experiments.pabbo_lda.optimizers.cma_es import CovarianceAdaptation
from experiments.pabbo_lda.optimizers.evolution import EvolutionStrategy
from experiments.pabbo_lda.optimizers.gaussian_process import ExpectedImprovement
from experiments.pabbo_lda.optimizers.genetic import GeneticAlgorithm
from experiments.pabbo_lda.optimizers.golden_section import GoldenSection
from experiments.pabbo_lda.optimizers.pabbo import PABBO, PolicySettings, Scorer, model_scorer
from experiments.pabbo_lda.optimizers.pabbo_curves import CurvePABBO
from experiments.pabbo_lda.optimizers.prior_fitted import SurrogateImprovement
from experiments.pabbo_lda.optimizers.random_search import RandomSearch, RandomTopics
from experiments.pabbo_lda.optimizers.sabbo import SABBO
from experiments.pabbo_lda.optimizers.space import IntegerRange, Point, Space
from experiments.pabbo_lda.optimizers.tpe import TPE
from experiments.pabbo_lda.surrogate.posterior import weights_sha256
from raypipe.provenance import package_version

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
    "bisect",
    "gp_ei",
    "pfn_ei",
    "cma_es",
]

#: optimizers that search T alone; the priors are 1/T
T_ONLY: frozenset[OptimizerName] = frozenset(
    {"pabbo_small", "pabbo_large", "pabbo_curves", "golden_section", "bisect"}
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
    "deciding_libraries",
    "make_optimizer",
    "model_scorer",
]


class Optimizer(Protocol):
    """A minimizer of a function of the points of a space.

    Deterministic by its seed, with its own random generator; a value that is not finite counts as
    the worst. It receives the start values before the first ``ask``.
    """

    def ask(self) -> list[Point]:
        """Return the next batch of points, possibly with known ones; empty once it is finished."""

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Receive the values of the start, or of the last batch, in the order asked."""


def make_optimizer(
    name: OptimizerName,
    *,
    space: Space,
    seed: int,
    scorer: Scorer | None = None,
    policy: PolicySettings | None = None,
) -> Optimizer:
    """Return a fresh optimizer of the points of a space.

    Args:
        name: one of the names of the configuration.
        space: the points that it searches; PABBO takes its scale of T from its own settings.
        seed: the seed of every random draw.
        scorer: the trained model, only for the three PABBO optimizers.
        policy: use of the model by ``pabbo_small`` and ``pabbo_large``; the defaults if None.

    Raises:
        ValueError: an unknown name, PABBO without a scorer, or priors for an optimizer that
            searches T alone.

    """
    if name in T_ONLY and space.priors:
        raise ValueError(
            f"{name} searches T alone, not {' and '.join(space.priors)}: "
            f"leave their ranges away, or use another optimizer than {', '.join(sorted(T_ONLY))}"
        )
    match name:
        case "ga":
            return GeneticAlgorithm(space, seed)
        case "es":
            return EvolutionStrategy(space, seed)
        case "pabbo_small" | "pabbo_large" | "pabbo_curves":
            if scorer is None:
                raise ValueError(f"{name} needs the scorer of a trained model")
            if name == "pabbo_curves":
                return CurvePABBO(space.topics, seed, scorer)
            policy = policy or PolicySettings()
            topics = IntegerRange(space.t_min, space.t_max, policy.scale)
            return PABBO(topics, seed, scorer, policy)
        case "sabbo":
            return SABBO(space, seed)
        case "random":
            return RandomSearch(space, seed) if space.priors else RandomTopics(space.topics, seed)
        case "tpe":
            return TPE(space, seed)
        case "golden_section":
            return GoldenSection(space.topics)
        case "bisect":
            return Bisection(space.topics)
        case "gp_ei":
            return ExpectedImprovement(space, seed)
        case "cma_es":
            return CovarianceAdaptation(space, seed)
        case "pfn_ei":
            return SurrogateImprovement(space, seed)
        case _:
            known = ", ".join(get_args(OptimizerName))
            raise ValueError(f"optimizer {name!r} is not known; the optimizers are {known}")


def deciding_libraries(name: OptimizerName) -> dict[str, str]:
    """Return what decides what an optimizer proposes: releases of libraries, or shipped weights.

    From the same seed, Optuna 4 and 5 propose different points.
    """
    if name == "pfn_ei":
        return {"surrogate": weights_sha256()}
    libraries = {
        "tpe": ("optuna",),
        "gp_ei": ("scikit-learn", "scipy"),
        "cma_es": ("cmaes",),
    }.get(name, ())
    return {library: str(release(library)) for library in libraries}


def release(name: str) -> str | None:
    """Return the first two parts of a package's version, ``5.0`` of 5.0.1; None if missing."""
    found = package_version(name)
    return None if found is None else ".".join(found.split(".")[:2])
