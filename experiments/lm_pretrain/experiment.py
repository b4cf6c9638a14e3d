"""Pretrain a language model, and compare its loss on held-out text with n-grams and xz."""

from __future__ import annotations

from experiments.lm_pretrain.baselines import run_baselines
from experiments.lm_pretrain.data import keys_read, text_content
from experiments.lm_pretrain.evaluation import run_evaluate
from experiments.lm_pretrain.export import run_export
from experiments.lm_pretrain.sampling import run_sample
from experiments.lm_pretrain.settings import PretrainingSettings
from experiments.lm_pretrain.shards import run_tokenize
from experiments.lm_pretrain.tables import STEP_METRICS, TABLES, sections
from experiments.lm_pretrain.training import build_random_task, build_task
from raypipe import Experiment, Stage, Unit, hardware_stage, train_stage


def stages(settings: PretrainingSettings) -> list[Stage]:
    """Return the stages: for text tokenize, baselines, train, evaluate, sample, export; else train.

    Raises:
        CorpusError: a file does not exist.

    """
    data = settings.data
    if data.source == "random":
        keys = ("data.source", "data.samples", "data.held_out", "data.seed")
        training = train_stage(
            "train",
            settings.train.without_selection(),  # there is nothing to learn
            build_random_task,
            reads=("model", "train", *keys),
        )
        return [hardware_stage(), training]
    reads = ["data.tokens", *(f"data.{key}" for key in keys_read(data))]
    if data.tokens == "bpe":
        reads.append("model.vocabulary")
    text = Unit("tokenize", text_content(data))
    # a literal: the training checks the prompt, but does not depend on it
    prompt = Unit("sample", {"sample.prompt": settings.sample.prompt})
    on_gpu = settings.train.scaling.gpus_per_worker != 0
    export = Stage(
        "export", run_export, needs=("train",), reads=("model",), workload="the model's files"
    )
    return [
        hardware_stage(),
        Stage("tokenize", run_tokenize, [text], ("hardware",), tuple(reads), "the whole text"),
        Stage(
            "baselines",
            run_baselines,
            needs=("tokenize",),
            reads=("data.validation_share",),
            workload="held-out text",
        ),
        train_stage(
            "train",
            settings.train,
            build_task,
            needs=("tokenize",),
            reads=("model", "train", "sample.prompt", "data.validation_share", "data.most_passes"),
        ),
        Stage(
            "evaluate",
            run_evaluate,
            needs=("train", "baselines"),
            reads=("model", "train.training.precision", "data.validation_share"),
            workload="held-out text",
            on_gpu=on_gpu,
        ),
        Stage(
            "sample",
            run_sample,
            [prompt],
            needs=("train",),
            reads=("model", "sample", "train.training.precision"),
            workload=f"at most {settings.sample.tokens} tokens",
            on_gpu=on_gpu,
        ),
        *([export] if settings.export else []),
    ]


EXPERIMENT = Experiment(
    "lm_pretrain",
    2,
    PretrainingSettings,
    stages,
    sections,
    tables=TABLES,
    step_metrics=STEP_METRICS,
)
