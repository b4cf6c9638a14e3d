"""The stages of the transformer trainer."""

from __future__ import annotations

from experiments.transformer.settings import TrainerSettings
from experiments.transformer.training import RandomSamples, TransformerTask
from raypipe.experiment import Stage
from raypipe.paths import RunDirectory
from raypipe.stages import hardware_stage, train_stage

#: part of every unit's identity; raised when results change
VERSION = 1


def stages(settings: TrainerSettings) -> list[Stage]:
    """Hardware, and the training."""

    def build_task(run: RunDirectory | None) -> TransformerTask:
        del run
        model, data = settings.model, settings.data
        return TransformerTask(
            model,
            RandomSamples(model, data.samples, data.seed),
            RandomSamples(model, data.held_out, data.seed, first=data.samples),
        )

    identity = {
        "version": VERSION,
        "data": settings.data.model_dump(mode="json"),
        "model": settings.model.model_dump(mode="json"),
    }
    return [hardware_stage(), train_stage("train", settings.train, build_task, identity)]
