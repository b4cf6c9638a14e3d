"""Ready experiment for a script: a configuration file is all that a user writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from raypipe.config.settings import Settings
from raypipe.graph.experiment import Experiment, Stage
from raypipe.graph.stages import hardware_stage
from raypipe.scripts.settings import ScriptStageSettings
from raypipe.scripts.stage import script_stage
from raypipe.store.tables import Column


class ScriptExperiment(Settings):
    """A training with a script."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    """Values of your own, by any name: placeholders of the command, and keys of `matrix` and
    `sweep.axes` (`parameters.dropout`).
    """
    train: ScriptStageSettings
    """The command, and the training settings."""


def _stages(settings: ScriptExperiment) -> Sequence[Stage]:
    return [hardware_stage(), script_stage("train", settings.train, settings.parameters)]


METRICS = (
    Column("eval_loss", "real", "Held-out loss.", better="lower"),
    Column("eval_accuracy", "real", "Held-out accuracy.", better="higher"),
)
EXPERIMENT = Experiment("scripts", 1, ScriptExperiment, _stages, step_metrics=METRICS)
