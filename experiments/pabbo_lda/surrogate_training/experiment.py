"""Train the surrogate that ships with raypipe (:mod:`experiments.pabbo_lda.surrogate`)."""

from __future__ import annotations

from experiments.pabbo_lda.settings import StepsStageSettings
from experiments.pabbo_lda.surrogate_training.task import PriorFittingSettings, PriorFittingTask
from raypipe.config.settings import Settings
from raypipe.graph.experiment import Experiment, Stage
from raypipe.graph.stages import hardware_stage, train_stage
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Column
from raypipe.training.settings import TrainingSettings

STEP_METRICS = (
    Column(
        "eval_surprise",
        "real",
        "Mean negative log density of values of held-out functions.",
        better="lower",
    ),
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
    return [
        hardware_stage(),
        train_stage("train", settings.train, _build_task, reads=("train",)),
    ]


def _build_task(
    settings: SurrogateTrainingSettings, run_dir: RunDirectory | None
) -> PriorFittingTask:
    del run_dir  # the functions are drawn
    return PriorFittingTask(settings.train.surrogate)


EXPERIMENT = Experiment(
    "surrogate", 1, SurrogateTrainingSettings, stages, step_metrics=STEP_METRICS
)
