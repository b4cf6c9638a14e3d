"""Train a transformer on a table or sequences, and compare it with simpler models."""

from __future__ import annotations

from functools import partial

from experiments.transformer.baselines import methods, run_baselines
from experiments.transformer.comparison import run_compare
from experiments.transformer.data import load
from experiments.transformer.evaluation import run_evaluate
from experiments.transformer.figures import sections
from experiments.transformer.prepare import run_prepare
from experiments.transformer.settings import TrainerSettings
from experiments.transformer.tables import STEP_METRICS, TABLES
from experiments.transformer.training import build_task
from raypipe import ConfigError, Experiment, Stage, Unit, hardware_stage, train_stage


def stages(settings: TrainerSettings) -> list[Stage]:
    """Return all stages; of random samples only hardware and train.

    Raises:
        ConfigError: the data cannot be used, or the model does not suit them.

    """
    data = load(settings.data, settings.model.kind)
    ngrams = settings.model.ngrams
    if ngrams is not None and data is not None and data.columns:
        raise ConfigError(
            "model.ngrams: n-grams are those of texts, but the data have none; leave it out, or "
            "give model.ngrams=null"
        )
    settings.model.completed(data.sizes() if data else {})  # refuse contradictions now
    task = partial(build_task, data)
    if data is None:
        return [hardware_stage(), train_stage("train", settings.train.without_selection(), task)]
    train, held_out = len(data.train.target), len(data.held_out.target)
    compare = Stage(
        "compare",
        partial(run_compare, data),
        needs=("evaluate", "baselines"),
        reads=(),
        workload=f"{held_out} rows",
    )
    return [
        hardware_stage(),
        Stage(
            "prepare",
            partial(run_prepare, data, ngrams),
            [Unit("prepare", {"content": dict(data.identity)})],
            ("hardware",),
            ("data", "model.length", "model.kind", *(["model.ngrams"] if ngrams else [])),
            f"{train + held_out} rows",
        ),
        Stage(
            "baselines",
            partial(run_baselines, data),
            [Unit("baselines", {"content": dict(data.identity)})],
            ("hardware",),
            ("data", "model.kind"),
            f"{len(methods(data))} baselines",
        ),
        train_stage("train", settings.train, task, ("prepare",)),
        Stage(
            "evaluate",
            partial(run_evaluate, data),
            needs=("train",),
            reads=("model", "train.training.precision"),
            workload=f"{held_out} rows",
            on_gpu=settings.train.scaling.gpus_per_worker != 0,
        ),
        *([compare] if data.target.kind == "classification" else []),
    ]


EXPERIMENT = Experiment(
    "transformer",
    3,
    TrainerSettings,
    stages,
    sections,
    tables=TABLES,
    step_metrics=STEP_METRICS,
)
