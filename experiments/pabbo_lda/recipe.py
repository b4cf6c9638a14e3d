"""What PABBO trains on: the settings of its two phases."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from experiments.pabbo_lda.evaluation import EvaluationSettings, check_pairs
from experiments.pabbo_lda.functions import FunctionSettings
from experiments.pabbo_lda.model import ModelSettings
from raypipe.config.settings import Settings


class PabboSettings(Settings):
    """What PABBO trains on.

    The defaults are the recipe of ``benchmarks/pabbo.py`` for a CPU, with an effective batch of 32,
    a learning rate of 3e-3 and gradients clipped at 1. Published: ``policy_gradient=published``,
    ``policy_learning_rate=3e-5``, ``prediction_splits`` = horizon + 1, burn-in 3000 of 8000 steps,
    16 x 20 trajectories of 64 duels, 100 points and pairs; quick: burn-in 800 of 2000 steps, 8 x 10
    trajectories of 30 duels, 50 points and pairs.
    """

    model: ModelSettings = Field(ModelSettings(), description="the transformer")
    functions: FunctionSettings = Field(FunctionSettings(), description="training functions")
    evaluation: EvaluationSettings = Field(
        EvaluationSettings(functions=20, starts=1, candidate_pairs=256),
        description="a small held-out measure beside the training; the stage after it is the real",
    )
    burn_in: float = Field(0.6, ge=0, le=1, description="fraction of the steps before the policy")
    policy_batch: PositiveInt = Field(32, description="functions a policy step")
    trajectories: PositiveInt = Field(1, description="trajectories a function")
    horizon: PositiveInt = Field(30, description="duels a trajectory")
    query_points: PositiveInt = Field(64, description="points the trajectories choose from")
    candidate_pairs: PositiveInt = Field(256, description="pairs of them that can be asked")
    prediction_points: PositiveInt = Field(50, description="points of the prediction duels")
    prediction_duels: PositiveInt = Field(50, description="duels a function, context and target")
    prediction_splits: PositiveInt = Field(4, description="context/target splits a function")
    max_context: PositiveInt = Field(20, description="largest context of a split, in duels")
    discount: float = Field(0.98, gt=0, le=1, description="of the reward, by step")
    policy_gradient: Literal["published", "expected_improvement"] = Field(
        "expected_improvement",
        description="REINFORCE with returns standardised over each trajectory, as published, or "
        "the expected improvement over all candidates, which learns from far fewer trajectories",
    )
    policy_learning_rate: PositiveFloat = Field(1e-3, description="peak in the policy phase")
    prediction_weight: float = Field(1.0, ge=0, description="of the prediction loss in it")

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
