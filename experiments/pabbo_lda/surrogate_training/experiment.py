"""Train the surrogate that ships with raypipe (:mod:`experiments.pabbo_lda.surrogate`).

The loss is the log density of unseen values (Mueller et al., ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from experiments.common.tables import columns
from experiments.pabbo_lda.pabbo.training import GeneratedTask
from experiments.pabbo_lda.settings import StepsStageSettings
from experiments.pabbo_lda.surrogate.model import Mixture, SurrogateModel, SurrogateSettings
from experiments.pabbo_lda.surrogate_training.prior import (
    STREAM_SIZE,
    SearchStates,
    sample_searches,
)
from raypipe import (
    Experiment,
    Loss,
    Operational,
    RunDirectory,
    Settings,
    Stage,
    StepContext,
    TrainingSettings,
    hardware_stage,
    keyed_random,
    train_stage,
)

#: share of the steps whose searches have few evaluations, and at most how many these are
_SHORT, _FEW = 0.25, 7
#: log density beyond which more does not count: a function without noise has no bound
_DENSEST = 30.0
#: functions of the evaluation, apart from those of any training
_HELD_OUT = 2**40
_HELD_OUT_SEED = 1_000_000
#: evaluations per function of the searches that are held out
_HELD_OUT_SIZES = (3, 8, 20, 35)


class PriorFittingSettings(Settings):
    """Training of the surrogate on synthetic functions."""

    model: SurrogateSettings = SurrogateSettings()
    """Size of the network."""
    evaluations: PositiveInt = Field(40, ge=8)
    """Largest number of evaluated points per function."""
    queries: PositiveInt = Field(32, ge=2)
    """Values to predict per function."""
    held_out: Operational[PositiveInt] = 256
    """Held-out functions per number of evaluated points."""


class PriorFittingTask(GeneratedTask):
    """Training of the surrogate; a sample is a function."""

    def build_model(self) -> SurrogateModel:
        """Return the network of the settings."""
        return SurrogateModel(self.settings.model)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the layers of the network."""
        assert isinstance(model, SurrogateModel)
        return model.layers

    def metadata(self) -> Mapping[str, str]:
        """Return the size of the network, which ``experiments.pabbo_lda.surrogate.model`` reads."""
        return {"surrogate": self.settings.model.model_dump_json()}

    def loss(self, model: SurrogateModel, batch: Tensor, context: StepContext) -> Loss:
        """Return the loss of the functions ``batch``, an int64 ``[B]``."""
        draws = keyed_random.uniform(context.seed, STREAM_SIZE, torch.tensor([context.step]), 2)
        short, share = draws[0].tolist()
        size = 1 + int(share * (_FEW if short < _SHORT else self.settings.evaluations))
        with torch.autocast(batch.device.type, enabled=False):
            searches = sample_searches(context.seed, batch, size, self.settings.queries)
        surprise = _surprise(model, searches).clamp(min=-_DENSEST).mean(1)
        return Loss(surprise.sum(), len(batch))

    def evaluate(
        self, model: SurrogateModel, device: torch.device, batch_size: int
    ) -> Mapping[str, float]:
        """Return the mean negative log density of the values of held-out functions."""
        del batch_size
        samples = _HELD_OUT + torch.arange(self.settings.held_out, device=device)
        with torch.autocast(device.type, enabled=False):
            surprises = [
                _surprise(model, sample_searches(_HELD_OUT_SEED, samples, size, 40)).mean()
                for size in _HELD_OUT_SIZES
            ]
        return {"surprise": torch.stack(surprises).mean().item()}


def _surprise(model: SurrogateModel, searches: SearchStates) -> Tensor:
    """Return the negative log density ``[B, m]`` of the targets."""
    s = searches
    posterior: Mixture = model(s.known, s.values, s.queries, s.used)
    return -posterior.log_density(s.targets)


STEP_METRICS = columns(
    eval_surprise="real lower: Mean negative log density of values of held-out functions.",
)


class SurrogateStageSettings(StepsStageSettings):
    """Training of the surrogate."""

    training: TrainingSettings = TrainingSettings(
        steps=8500,
        effective_batch=64,
        learning_rate=2e-3,
        betas=(0.9, 0.99),
        weight_decay=1e-4,
        warmup_steps=300,
        schedule="warmup-stable-decay",
        decay_steps=2500,
        clip_norm=1.0,
        eval_every=1000,
    )
    """Length, optimizer, batch sizes and precision; `effective_batch` counts functions per step."""
    surrogate: PriorFittingSettings = PriorFittingSettings()
    """Size of the network, and of the training's searches."""


class SurrogateTrainingSettings(Settings):
    """The training of the surrogate."""

    train: SurrogateStageSettings = SurrogateStageSettings()
    """Training of the surrogate."""


def stages(settings: SurrogateTrainingSettings) -> list[Stage]:
    """Return the hardware check and the training."""
    return [hardware_stage(), train_stage("train", settings.train, _build_task, reads=("train",))]


def _build_task(
    settings: SurrogateTrainingSettings, run_dir: RunDirectory | None
) -> PriorFittingTask:
    del run_dir  # the functions are drawn
    return PriorFittingTask(settings.train.surrogate)


EXPERIMENT = Experiment(
    "surrogate", 1, SurrogateTrainingSettings, stages, step_metrics=STEP_METRICS
)
