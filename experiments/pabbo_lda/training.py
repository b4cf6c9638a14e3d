"""Training of PABBO: a burn-in on preferences, then the policy by REINFORCE (ICLR 2025, section 4).

Burn-in: of each function's duels a random part is context, and the model predicts the winners of
the others. Policy: trajectories of T duels on each function, drawn from the acquisition head, with
the prediction loss besides. Everything is drawn by keyed random numbers on the model's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.pabbo_lda.evaluation import EvaluationSettings, evaluate_model
from experiments.pabbo_lda.functions import FunctionSettings
from experiments.pabbo_lda.losses import burn_in_loss, policy_loss
from experiments.pabbo_lda.model import ModelSettings, PabboModel
from raypipe.settings import Settings
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import Loss, Phase, SampleIds, StepContext, TrainTask


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
    evaluation: EvaluationSettings = Field(EvaluationSettings(), description="held-out measure")
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


class PabboTask(TrainTask):
    """PABBO as a training problem; a sample is a function."""

    shuffle = False
    unused_parameters = True  # the acquisition head rests during the burn-in

    def __init__(self, settings: PabboSettings) -> None:
        _check(settings)
        self.settings = settings

    def build_model(self) -> PabboModel:
        """The transformer of the settings."""
        return PabboModel(self.settings.model)

    def metadata(self) -> Mapping[str, str]:
        """The model's size, as :func:`~experiments.pabbo_lda.model.load_model` reads it."""
        return {"model": self.settings.model.model_dump_json()}

    def build_dataset(self) -> Dataset[int]:
        """Numbers of functions."""
        return SampleIds()

    def phases(self, training: TrainingSettings, effective_batch: int) -> Sequence[Phase]:
        """The burn-in with the training batch, then the policy phase with its own."""
        if training.steps is None:
            raise ValueError("training.steps is missing: PABBO draws its samples, it has no epochs")
        s = self.settings
        burn_in = round(s.burn_in * training.steps)
        phases = (
            Phase("burn_in", burn_in, effective_batch, training.learning_rate),
            Phase("policy", training.steps - burn_in, s.policy_batch, s.policy_learning_rate),
        )
        return [phase for phase in phases if phase.steps]

    def loss(self, model: nn.Module, batch: Tensor, context: StepContext) -> Loss:
        """The loss of the functions ``batch``, an int64 ``[B]``."""
        model = cast(PabboModel, model)
        if context.phase.name == "burn_in":
            return burn_in_loss(model, batch, context.seed, self.settings)
        return policy_loss(model, batch, context.seed, self.settings)

    def evaluate(self, model: nn.Module, device: torch.device) -> Mapping[str, float]:
        """Simple regret on held-out functions, beside that of random search."""
        model = cast(PabboModel, model)
        return evaluate_model(model, self.settings.evaluation, self.settings.functions, device)


def _check(s: PabboSettings) -> None:
    """Raise ValueError where the settings do not fit together."""
    for pairs, points in (("candidate_pairs", "query_points"),
                          ("prediction_duels", "prediction_points")):  # fmt: skip
        n = getattr(s, points)
        if getattr(s, pairs) > n * (n - 1) // 2:
            raise ValueError(f"{pairs} is {getattr(s, pairs)}, but {points}={n} form fewer pairs")
    if s.horizon > s.candidate_pairs:
        raise ValueError(f"horizon={s.horizon} exceeds candidate_pairs={s.candidate_pairs}")
    if s.max_context >= s.prediction_duels:
        raise ValueError(f"max_context={s.max_context} leaves none of the prediction_duels")
