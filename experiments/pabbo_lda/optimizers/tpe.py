"""Optuna's tree-structured Parzen estimator on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler

from experiments.pabbo_lda.optimizers.space import Point, Space, as_losses


class TPE:
    """``optuna.samplers.TPESampler`` through ask and tell (Bergstra et al. 2011).

    A batch is one point. The sampler ranks values and never uses their size. It may propose a
    known point again. Its arguments are spelled out because their defaults change between
    releases of Optuna.
    """

    def __init__(self, space: Space, seed: int) -> None:
        # Otherwise Optuna announces every study on standard error.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = TPESampler(
            n_startup_trials=10,
            n_ei_candidates=24,
            multivariate=True,
            group=False,
            constant_liar=False,  # one trial at a time
            seed=seed,
        )
        self._study = optuna.create_study(direction="minimize", sampler=sampler)
        self._priors = space.priors
        self._space: dict[str, BaseDistribution] = {
            "T": IntDistribution(space.t_min, space.t_max, log=space.scale == "log")
        }
        for name, prior in self._priors.items():
            self._space[name] = FloatDistribution(prior.low, prior.high, log=True)
        self._asked: optuna.Trial | None = None

    def ask(self) -> list[Point]:
        """Return the next point."""
        self._asked = self._study.ask(self._space)
        params = self._asked.params
        # The sampler keeps the value that it drew, at most half a percent from the rounded one.
        priors = {name: prior.nearest(params[name]) for name, prior in self._priors.items()}
        return [Point(int(params["T"]), **priors)]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Finish the asked trial, or add the start values as finished trials."""
        losses = [float(loss) for loss in as_losses(values)]
        if self._asked is not None:
            self._study.tell(self._asked, losses[0])
            self._asked = None
            return
        for point, loss in zip(points, losses, strict=True):
            trial = optuna.trial.create_trial(
                params={name: getattr(point, name) for name in self._space},
                distributions=self._space,
                value=loss,
            )
            self._study.add_trial(trial)
