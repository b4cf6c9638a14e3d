"""PABBO as a search algorithm of Ray Tune.

    search = PabboSearch(metric="loss", mode="min", seed=0)
    tune.Tuner(train, param_space=space, tune_config=tune.TuneConfig(search_alg=search)).fit()

Ray Tune's own integration of Optuna keeps the trials, and saves and restores them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from optuna.distributions import BaseDistribution
from ray.tune.search.optuna import OptunaSearch

from experiments.pabbo_lda.samplers.optuna import PabboSampler
from experiments.pabbo_lda.surrogate.posterior import Surrogate


class PabboSearch(OptunaSearch):
    """Searcher for up to three integer or float parameters, with :class:`PabboSampler`.

    A trial that a scheduler ends early counts with its last result. One whose last result lacks the
    metric, or has no finite value of it, counts as failed.

    Args:
        space: Optuna's distributions by parameter; by default Tune's ``param_space``.
        metric: the metric in the results; by default that of ``TuneConfig``.
        mode: whether the metric is minimized or maximized; by default that of ``TuneConfig``.
        points_to_evaluate: parameters to try first.
        evaluated_rewards: the metric at these points, if it is known.
        seed: the seed; by default a random one.
        n_startup_trials: trials with a value before the surrogate is used.
        surrogate: scores the candidates; by default the one that is shipped.

    """

    def __init__(
        self,
        space: Mapping[str, BaseDistribution] | None = None,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        *,
        points_to_evaluate: Sequence[dict[str, Any]] | None = None,
        evaluated_rewards: Sequence[float] | None = None,
        seed: int | None = None,
        n_startup_trials: int = 5,
        surrogate: Surrogate | None = None,
    ) -> None:
        sampler = PabboSampler(seed=seed, n_startup_trials=n_startup_trials, surrogate=surrogate)
        super().__init__(
            space=None if space is None else dict(space),
            metric=metric,
            mode=mode,
            points_to_evaluate=None if points_to_evaluate is None else list(points_to_evaluate),
            evaluated_rewards=None if evaluated_rewards is None else list(evaluated_rewards),
            sampler=sampler,
        )

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Record an intermediate result; one without a finite value is ignored."""
        if self._has_value(result):
            super().on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record the end of a trial."""
        if not self._has_value(result):
            result, error = None, True
        super().on_trial_complete(trial_id, result, error)

    def _has_value(self, result: Mapping[str, Any] | None) -> bool:
        value = None if result is None else result.get(self.metric)
        return value is not None and math.isfinite(value)
