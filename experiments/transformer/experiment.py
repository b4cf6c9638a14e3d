"""The transformer trainer: prepare data, train, evaluate."""

from __future__ import annotations

from functools import partial
from typing import Any

from experiments.transformer.data import Data, Kind
from experiments.transformer.dataset import StoredSamples
from experiments.transformer.evaluation import evaluate
from experiments.transformer.figures import figures
from experiments.transformer.prepare_stage import prepare
from experiments.transformer.sequence_data import load_builtin, load_sequences
from experiments.transformer.settings import DataSettings, TrainerSettings
from experiments.transformer.table_data import load_table
from experiments.transformer.tables import STEP_METRICS, TABLES
from experiments.transformer.training import RandomSamples, TransformerTask
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.experiment import Experiment, Stage, Unit
from raypipe.pipeline.stages import hardware_stage, train_stage
from raypipe.storage.run_directory import RunDirectory


def stages(settings: TrainerSettings) -> list[Stage]:
    """Return hardware and train; for data other than random samples also prepare and evaluate.

    Raises:
        ConfigError: the data cannot be used, or the model does not suit them.

    """
    data = load(settings.data, settings.model.kind)
    settings.model.completed(data.sizes() if data else {})  # refuse contradictions now
    if data is None:
        return [hardware_stage(), train_stage("train", settings.train, build_random_task)]
    literals = {"content": dict(data.identity)}
    on_gpu = settings.train.scaling.gpus_per_worker != 0
    rows = len(data.train.target) + len(data.test.target)
    return [
        hardware_stage(),
        Stage(
            "prepare",
            partial(_prepare, data),
            [Unit("prepare", literals)],
            ("hardware",),
            ("data", "model.length", "model.kind"),
            f"{rows} rows",
        ),
        train_stage(
            "train",
            settings.train,
            partial(build_task, data),
            ("prepare",),
            literals=literals,
        ),
        Stage(
            "evaluate",
            partial(_evaluate, data),
            [Unit("evaluate", literals)],
            ("train",),
            ("model",),
            f"{len(data.test.target)} rows",
            on_gpu=on_gpu,
        ),
    ]


def load(settings: DataSettings, kind: Kind | None) -> Data | None:
    """Return the data of the settings; None for samples that are drawn at random.

    Raises:
        CorpusError: the data cannot be used.

    """
    if settings.source == "builtin":
        return load_builtin(settings, kind)
    if settings.source == "table":
        return load_table(settings, kind)
    if settings.source == "sequences":
        return load_sequences(settings, kind)
    return None


def build_task(data: Data, settings: Any, run_dir: RunDirectory | None) -> TransformerTask:
    """Return the training on prepared samples; without a run directory, on random ones."""
    model = settings.model.completed(data.sizes())
    if run_dir is None:
        return _random_task(settings, model)
    deviation = data.target.deviation if model.kind == "regression" else None
    train, test = StoredSamples(run_dir, "train"), StoredSamples(run_dir, "test")
    return TransformerTask(model, train, test, deviation)


def build_random_task(settings: Any, run_dir: RunDirectory | None) -> TransformerTask:
    """Return the training on random samples."""
    del run_dir
    return _random_task(settings, settings.model.completed({}))


def _random_task(settings: Any, model: Any) -> TransformerTask:
    data = settings.data
    samples = RandomSamples(model, data.samples, data.seed)
    held_out = RandomSamples(model, data.held_out, data.seed, first=data.samples)
    return TransformerTask(model, samples, held_out)


def _prepare(data: Data, context: StageContext) -> None:
    prepare(context, data, context.settings.model.length)


def _evaluate(data: Data, context: StageContext) -> None:
    evaluate(context, data, context.settings.model.completed(data.sizes()), "train")


EXPERIMENT = Experiment(
    "transformer",
    2,
    TrainerSettings,
    stages,
    figures,
    tables=TABLES,
    step_metrics=STEP_METRICS,
)
