"""Training task of PABBO: a burn-in on preferences, then the policy (ICLR 2025, section 4).

Burn-in: a random part of each function's duels is context, and the model predicts the winners of
the others. Policy: trajectories of T duels on each function, drawn from the acquisition head,
together with the prediction loss. All random numbers are keyed and drawn on the model's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.pabbo_lda.pabbo.evaluation import evaluate_model
from experiments.pabbo_lda.pabbo.losses import burn_in_loss, policy_loss
from experiments.pabbo_lda.pabbo.model import PabboModel, PabboModelSettings
from experiments.pabbo_lda.pabbo.training_settings import PabboSettings
from raypipe.config.settings import Settings
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import Loss, SampleIds, StepContext, TrainTask


class ModelTask(TrainTask):
    """Training of PABBO's transformer on samples that are drawn from their numbers."""

    shuffle = False
    unused_parameters = True  # a phase may use one head only
    compile_loss = False  # a loop over duels would be unrolled

    def __init__(self, model: PabboModelSettings, trained_on: Settings) -> None:
        self._model, self._trained_on = model, trained_on

    def build_model(self) -> PabboModel:
        """Return the transformer of the settings."""
        return PabboModel(self._model)

    def metadata(self) -> Mapping[str, str]:
        """Return the model's size, and the distribution of its samples."""
        return {
            "model": self._model.model_dump_json(),
            "trained_on": self._trained_on.model_dump_json(),
        }

    def build_dataset(self) -> Dataset[int]:
        """Return the numbers of samples."""
        return SampleIds()


class PabboTask(ModelTask):
    """Training of PABBO on synthetic functions; a sample is a function."""

    def __init__(self, settings: PabboSettings) -> None:
        super().__init__(settings.model, settings.distribution)
        self.settings = settings

    def phases(self, training: TrainingSettings, effective_batch: int) -> Sequence[Phase]:
        """Return the burn-in with the training batch, then the policy phase with its own batch."""
        s, steps = self.settings, training.steps
        if steps is None:
            raise ValueError("training.steps is missing; PABBO has no epochs")
        burn_in = round(s.burn_in * steps)
        phases = (
            Phase("burn_in", burn_in, effective_batch, training.learning_rate),
            Phase("policy", steps - burn_in, s.policy_batch, s.policy_learning_rate),
        )
        return [phase for phase in phases if phase.steps]

    def loss(self, model: PabboModel, batch: Tensor, context: StepContext) -> Loss:
        """Return the loss of the functions ``batch``, an int64 ``[B]``."""
        if context.phase.name == "burn_in":
            return burn_in_loss(model, batch, context.seed, self.settings)
        return policy_loss(model, batch, context.seed, self.settings)

    def evaluate(
        self, model: PabboModel, device: torch.device, batch_size: int
    ) -> Mapping[str, float]:
        """Return the simple regret on held-out functions, of the model and of random search."""
        s = self.settings
        return evaluate_model(model, s.evaluation, s.functions, device, batch_size)
