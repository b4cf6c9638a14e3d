"""The stages of the transformer trainer."""

from __future__ import annotations

from experiments.transformer.data import Data, Kind
from experiments.transformer.evaluation import evaluate
from experiments.transformer.model import TransformerSettings
from experiments.transformer.prepare import prepare
from experiments.transformer.sequences import load_builtin, load_sequences
from experiments.transformer.settings import DataSettings, TrainerSettings
from experiments.transformer.stored import StoredSamples
from experiments.transformer.tables import load_table
from experiments.transformer.training import RandomSamples, TransformerTask
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.identity import fingerprint
from raypipe.pipeline.stages import hardware_stage, train_stage
from raypipe.storage.run_directory import RunDirectory

#: part of every unit's identity; raised when results change
VERSION = 1


def stages(settings: TrainerSettings) -> list[Stage]:
    """Hardware and the training; around it, where there are data, their preparation and measures.

    Raises:
        ConfigError: data that cannot be used, or a model that does not suit them.

    """
    data = load(settings.data, settings.model.kind)
    model = settings.model.completed(data.sizes() if data else {})
    read = {
        "version": VERSION,
        "data": {**settings.data.decisive(), **(data.identity if data else {})},
    }
    identity = {**read, "model": model.model_dump(mode="json")}

    def build_task(run: RunDirectory | None) -> TransformerTask:
        held = settings.data
        if data is None or run is None:  # random sequences are as long as any
            samples = RandomSamples(model, held.samples, held.seed)
            further = RandomSamples(model, held.held_out, held.seed, first=held.samples)
            return TransformerTask(model, samples, further)
        deviation = data.target.deviation if model.kind == "regression" else None
        return TransformerTask(
            model, StoredSamples(run, "train"), StoredSamples(run, "test"), deviation
        )

    needs = () if data is None else ("prepare",)
    training = train_stage("train", settings.train, build_task, identity, needs)
    if data is None:
        return [hardware_stage(), training]
    on_gpu = settings.train.scaling.gpus_per_worker != 0
    measuring = Unit("evaluate", {"train": fingerprint(training.units[0].identity)})
    return [
        hardware_stage(),
        _prepare_stage(
            data, model, Unit("prepare", {**read, "length": model.length, "kind": model.kind})
        ),
        training,
        _evaluate_stage(data, model, measuring, on_gpu=on_gpu),
    ]


def load(settings: DataSettings, kind: Kind | None) -> Data | None:
    """The data of the settings; None where samples are drawn at random."""
    if settings.source == "builtin":
        return load_builtin(settings, kind)
    if settings.source == "table":
        return load_table(settings, kind)
    if settings.source == "sequences":
        return load_sequences(settings, kind)
    return None


def _prepare_stage(data: Data, model: TransformerSettings, unit: Unit) -> Stage:
    def run(context: StageContext) -> None:
        prepare(context, data, model.length)
        context.finish(unit)

    cost = f"{len(data.train.target) + len(data.test.target)} rows"
    return Stage("prepare", run, [unit], ("hardware",), cost)


def _evaluate_stage(data: Data, model: TransformerSettings, unit: Unit, *, on_gpu: bool) -> Stage:
    def run(context: StageContext) -> None:
        evaluate(context, data, model, "train", on_gpu=on_gpu)
        context.finish(unit)

    cost = f"{len(data.test.target)} rows"
    return Stage("evaluate", run, [unit], ("train",), cost, on_gpu=on_gpu)
