"""Optuna's tree-structured Parzen estimator on log T."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, IntDistribution

from experiments.pabbo_lda.optimizers.space import IntegerRange, as_losses


class TPE:
    """``optuna.samplers.TPESampler`` through ask and tell (Bergstra et al. 2011), one T a batch.

    The sampler ranks values and never uses their size. It may propose a known T again.
    """

    def __init__(self, space: IntegerRange, seed: int) -> None:
        # Optuna announces every study on standard error, however often one is made.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        self._space: dict[str, BaseDistribution] = {
            "T": IntDistribution(space.t_min, space.t_max, log=space.scale == "log")
        }
        self._asked: optuna.Trial | None = None

    def ask(self) -> list[int]:
        """The next T."""
        self._asked = self._study.ask(self._space)
        return [int(self._asked.params["T"])]

    def tell(self, points: Sequence[int], values: Sequence[float]) -> None:
        """Finish the trial that was asked, or add the start values as finished trials."""
        losses = [float(loss) for loss in as_losses(values)]
        if self._asked is not None:
            self._study.tell(self._asked, losses[0])
            self._asked = None
            return
        for T, loss in zip(points, losses, strict=True):
            trial = optuna.trial.create_trial(
                params={"T": int(T)}, distributions=self._space, value=loss
            )
            self._study.add_trial(trial)
