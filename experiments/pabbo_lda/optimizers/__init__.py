"""Optimizers of the number of topics T, and of the two priors, with an ask-and-tell interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, Protocol, get_args

from experiments.pabbo_lda.optimizers.bayesian import ExpectedImprovement, SurrogateImprovement
from experiments.pabbo_lda.optimizers.pabbo import (
    CURVE_POLICY,
    PABBO,
    CurvePABBO,
    PairScorer,
    PolicySettings,
)
from experiments.pabbo_lda.optimizers.populations import (
    SABBO,
    CovarianceAdaptation,
    EvolutionStrategy,
    GeneticAlgorithm,
)
from experiments.pabbo_lda.optimizers.sequential import (
    TPE,
    Bisection,
    GoldenSection,
    RandomSearch,
    RandomTopics,
)
from experiments.pabbo_lda.space import Point, Space
from experiments.pabbo_lda.surrogate.posterior import weights_sha256


class Optimizer(Protocol):
    """A minimizer of a function of the points of a space.

    Deterministic by its seed, with its own random generator; a value that is not finite counts as
    the worst. It receives the start values before the first ``ask``.
    """

    def ask(self) -> list[Point]:
        """Return the next batch of points, possibly with known ones; empty once it is finished."""

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Receive the values of the start, or of the last batch, in the order asked."""


OptimizerName = Literal[
    "ga", "es", "pabbo_small", "pabbo_large", "pabbo_curves", "sabbo", "random", "tpe",
    "golden_section", "bisect", "gp_ei", "pfn_ei", "cma_es",
]  # fmt: skip
#: optimizers that search T alone; the priors are 1/T
T_ONLY: frozenset[OptimizerName] = frozenset(
    {"pabbo_small", "pabbo_large", "pabbo_curves", "golden_section", "bisect"}
)
#: packages that decide what an optimizer proposes: from the same seed, Optuna 4 and 5 differ
_LIBRARIES: dict[OptimizerName, tuple[str, ...]] = {
    "tpe": ("optuna",),
    "gp_ei": ("scikit-learn", "scipy"),
    "cma_es": ("cmaes",),
}
#: the optimizers without a model, by name
_WITHOUT_MODEL: dict[OptimizerName, Callable[[Space, int], Optimizer]] = {
    "ga": GeneticAlgorithm,
    "es": EvolutionStrategy,
    "sabbo": SABBO,
    "tpe": TPE,
    "golden_section": GoldenSection,
    "bisect": Bisection,
    "gp_ei": ExpectedImprovement,
    "cma_es": CovarianceAdaptation,
    "pfn_ei": SurrogateImprovement,
}


def make_optimizer(
    name: OptimizerName,
    *,
    space: Space,
    seed: int,
    scorer: PairScorer | None = None,
    policy: PolicySettings | None = None,
) -> Optimizer:
    """Return a fresh optimizer of the points of a space.

    Args:
        name: one of the names of the configuration.
        space: the points that it searches.
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
    if name in _WITHOUT_MODEL:
        return _WITHOUT_MODEL[name](space, seed)
    if name == "random":
        return RandomSearch(space, seed) if space.priors else RandomTopics(space, seed)
    if name not in get_args(OptimizerName):
        known = ", ".join(get_args(OptimizerName))
        raise ValueError(f"optimizer {name!r} is not known; the optimizers are {known}")
    if scorer is None:
        raise ValueError(f"{name} needs the scorer of a trained model")
    if name == "pabbo_curves":
        return CurvePABBO(space, seed, scorer, CURVE_POLICY)
    return PABBO(space, seed, scorer, policy or PolicySettings())


def deciding_libraries(name: OptimizerName) -> dict[str, str]:
    """Return what decides what an optimizer proposes: releases of libraries, or shipped weights."""
    if name == "pfn_ei":
        return {"surrogate": weights_sha256()}
    return {library: str(release(library)) for library in _LIBRARIES.get(name, ())}


def release(name: str) -> str | None:
    """Return the first two parts of a package's version, ``5.0`` of 5.0.1; None if missing."""
    with suppress(PackageNotFoundError):
        return ".".join(version(name).split(".")[:2])
    return None
