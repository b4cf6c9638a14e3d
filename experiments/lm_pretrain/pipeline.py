"""The stages of language-model pretraining."""

from __future__ import annotations

from experiments.lm_pretrain.settings import PretrainingSettings
from experiments.lm_pretrain.training import LanguageModelTask, RandomTokens
from raypipe.experiment import Stage
from raypipe.paths import RunDirectory
from raypipe.stages import hardware_stage, train_stage

#: part of every unit's identity; raised when results change
VERSION = 1


def stages(settings: PretrainingSettings) -> list[Stage]:
    """Hardware, and the training."""

    def build_task(run: RunDirectory | None) -> LanguageModelTask:
        del run
        model, data = settings.model, settings.data
        size = (model.vocabulary, model.context)
        return LanguageModelTask(
            model,
            RandomTokens(*size, data.samples, data.seed),
            RandomTokens(*size, data.held_out, data.seed, held_out=True),
        )

    identity = {
        "version": VERSION,
        "data": settings.data.model_dump(mode="json"),
        "model": settings.model.model_dump(mode="json"),
    }
    return [hardware_stage(), train_stage("train", settings.train, build_task, identity)]
