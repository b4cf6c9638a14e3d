"""Train a model to summarize documents, and compare it with sentences of the documents."""

from __future__ import annotations

from functools import partial

from experiments.common.pretrained import model_fingerprint, require_libraries
from experiments.summarization.baselines import run_baselines
from experiments.summarization.data import keys_read, load
from experiments.summarization.evaluation import run_evaluate
from experiments.summarization.export import run_export
from experiments.summarization.settings import SummarizationSettings
from experiments.summarization.tables import STEP_METRICS, TABLES, sections
from experiments.summarization.tokenizer import run_tokenize
from experiments.summarization.training import build_task
from raypipe import Experiment, Stage, Unit, hardware_stage, train_stage


def stages(settings: SummarizationSettings) -> list[Stage]:
    """Return the stages: tokenize, train, evaluate, and export if it is wanted.

    Raises:
        ConfigError: documents that cannot be used, or ``transformers`` is not installed.

    """
    require_libraries("summarization", "transformers")
    data, name = load(settings.data), settings.model.pretrained
    pretrained = {} if name is None else {"model.pretrained": model_fingerprint(name)}
    workload = f"{len(data.train)} documents to train on, {len(data.held_out)} held out"
    lengths = ("data.source_length", "data.target_length")
    encoding = ("model.vocabulary", "model.pretrained", "data.prefix", *lengths)
    export = Stage(
        "export", run_export, needs=("train",), reads=("model",), workload="the model's files"
    )
    return [
        hardware_stage(),
        Stage(
            "tokenize",
            run_tokenize,
            [Unit("tokenize", {**data.content, **pretrained})],
            needs=("hardware",),
            reads=(*(f"data.{key}" for key in keys_read(settings.data)), *encoding),
            workload=workload,
        ),
        Stage(
            "baselines",
            run_baselines,
            needs=("tokenize",),
            reads=(),
            workload=f"{len(data.held_out)} held-out documents",
        ),
        train_stage(
            "train",
            settings.train,
            partial(build_task, len(data.validation) > 0),
            needs=("tokenize",),
            reads=("model", "label_smoothing", "copying", "train", *lengths),
            literals=pretrained,
        ),
        Stage(
            "evaluate",
            run_evaluate,
            needs=("train", "baselines"),
            reads=("model", "generation", "train.training.precision"),
            workload=workload,
            on_gpu=settings.train.scaling.gpus_per_worker != 0,
        ),
        *([export] if settings.export else []),
    ]


EXPERIMENT = Experiment(
    "summarization",
    3,
    SummarizationSettings,
    stages,
    sections,
    tables=TABLES,
    step_metrics=STEP_METRICS,
)
