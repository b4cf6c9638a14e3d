"""Training of PABBO: a burn-in on preferences, then the policy (ICLR 2025, section 4).

Burn-in: of each function's duels a random part is context, and the model predicts the winners of
the others. Policy: trajectories of T duels on each function, drawn from the acquisition head, with
the prediction loss besides. Everything is drawn by keyed random numbers on the model's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.pabbo_lda.pabbo.evaluation import evaluate_model
from experiments.pabbo_lda.pabbo.losses import burn_in_loss, policy_loss
from experiments.pabbo_lda.pabbo.model import ModelSettings, PabboModel
from experiments.pabbo_lda.pabbo.training_settings import PabboSettings
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import Loss, Phase, SampleIds, StepContext, TrainTask


class ModelTask(TrainTask):
    """A training of PABBO's transformer on samples that are drawn by their numbers."""

    shuffle = False
    unused_parameters = True  # one of the two heads may rest
    compile_loss = False  # a loop over duels would be unrolled

    def __init__(self, model: ModelSettings) -> None:
        self._model = model

    def build_model(self) -> PabboModel:
        """The transformer of the settings."""
        return PabboModel(self._model)

    def metadata(self) -> Mapping[str, str]:
        """The model's size, as :func:`~experiments.pabbo_lda.pabbo.model.load_model` reads it."""
        return {"model": self._model.model_dump_json()}

    def build_dataset(self) -> Dataset[int]:
        """Numbers of samples."""
        return SampleIds()


class PabboTask(ModelTask):
    """PABBO as a training problem; a sample is a function."""

    def __init__(self, settings: PabboSettings) -> None:
        super().__init__(settings.model)
        self.settings = settings

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

    def loss(self, model: PabboModel, batch: Tensor, context: StepContext) -> Loss:
        """The loss of the functions ``batch``, an int64 ``[B]``."""
        if context.phase.name == "burn_in":
            return burn_in_loss(model, batch, context.seed, self.settings)
        return policy_loss(model, batch, context.seed, self.settings)

    def evaluate(
        self, model: PabboModel, device: torch.device, batch_size: int
    ) -> Mapping[str, float]:
        """Simple regret on held-out functions, beside that of random search."""
        s = self.settings
        return evaluate_model(model, s.evaluation, s.functions, device, batch_size)
