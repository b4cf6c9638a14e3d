"""Settings of PABBO's training: model, synthetic functions, and both losses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from experiments.pabbo_lda.pabbo.held_out_functions import EvaluationSettings, check_pairs
from experiments.pabbo_lda.pabbo.model import PabboModelSettings
from experiments.pabbo_lda.pabbo.synthetic_functions import SyntheticFunctionSettings
from raypipe.config.settings import Operational, Settings


class PabboSettings(Settings):
    """Training of PABBO.

    The defaults are the recipe of ``benchmarks/pabbo.py`` for a CPU, with an effective batch of 32,
    a learning rate of 3e-3 and gradients clipped at 1. Published: ``policy_gradient=published``,
    ``policy_learning_rate=3e-5``, ``prediction_splits`` = horizon + 1, burn-in 3000 of 8000 steps,
    16 x 20 trajectories of 64 duels, 100 points and pairs; quick: burn-in 800 of 2000 steps, 8 x 10
    trajectories of 30 duels, 50 points and pairs.
    """

    model: PabboModelSettings = PabboModelSettings()
    """Size of the transformer."""
    functions: SyntheticFunctionSettings = SyntheticFunctionSettings()
    """Distribution of the training functions."""
    evaluation: Operational[EvaluationSettings] = EvaluationSettings(
        functions=20, starts=1, candidate_pairs=256
    )
    """Small evaluation on held-out functions during the training."""
    burn_in: float = Field(0.6, ge=0, le=1)
    """Fraction of the steps before the policy phase."""
    policy_batch: PositiveInt = 32
    """Functions per step of the policy phase."""
    trajectories: PositiveInt = 1
    """Trajectories per function."""
    horizon: PositiveInt = 30
    """Duels per trajectory."""
    query_points: PositiveInt = 64
    """Points per function from which the trajectories choose."""
    candidate_pairs: PositiveInt = 256
    """Pairs of the query points that a trajectory can choose as duels."""
    prediction_points: PositiveInt = 50
    """Points per function of the duels of the prediction loss."""
    prediction_duels: PositiveInt = 50
    """Duels per function of the prediction loss, context and targets together."""
    prediction_splits: PositiveInt = 4
    """Random splits per function into context and targets."""
    max_context: PositiveInt = 20
    """Maximum number of duels in the context of a split."""
    discount: float = Field(0.98, gt=0, le=1)
    """Discount of the reward per step."""
    policy_gradient: Literal["published", "expected_improvement"] = "expected_improvement"
    """Policy loss: REINFORCE with returns standardized over each trajectory, as published, or the
    expected improvement over all candidates, which needs far fewer trajectories.
    """
    policy_learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of the policy phase."""
    prediction_weight: float = Field(1.0, ge=0)
    """Weight of the prediction loss in the policy phase."""

    @property
    def distribution(self) -> SyntheticFunctionSettings:
        """The distribution of the samples."""
        return self.functions

    @model_validator(mode="after")
    def _fit_together(self) -> PabboSettings:
        check_pairs(self, "candidate_pairs", "query_points")
        check_pairs(self, "prediction_duels", "prediction_points")
        if self.horizon > self.candidate_pairs:
            raise ValueError(
                f"horizon={self.horizon} exceeds candidate_pairs={self.candidate_pairs}"
            )
        if self.max_context >= self.prediction_duels:
            raise ValueError(f"max_context={self.max_context} leaves none of the prediction_duels")
        return self
