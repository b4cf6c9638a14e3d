"""Stages that every experiment has a use for: the hardware check, and a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raypipe.pipeline.experiment import Stage, Training, Unit
from raypipe.provenance import environment_row, git_commit
from raypipe.training.settings import TrainStageSettings

if TYPE_CHECKING:
    from raypipe.pipeline.context import StageContext
    from raypipe.storage.run_directory import RunDirectory
    from raypipe.training.task import TrainTask


def hardware_stage() -> Stage:
    """Look at every node and record it in ``environment``; no GPU is a remark, no failure."""

    def run(context: StageContext) -> None:
        commit = git_commit()
        rows = context.session.launcher.on_every_node(environment_row)
        for row in rows:
            found = f"{row['gpu_count']} x {row['gpus']}" if row["gpus"] else "no GPU"
            context.say(
                f"{row['hostname']}: {found}, {row['cpus']} CPUs, "
                f"{row['memory_bytes'] / 2**30:.0f} GiB, torch {row['torch']}, "
                f"CUDA {row['cuda'] or 'none'}"
            )
        keyed = {f"{row['hostname']}/{commit}": {**row, "git_commit": commit} for row in rows}
        context.ledger.put("environment", keyed)
        context.device = next((row["gpus"] for row in rows if row["gpus"]), "cpu")
        context.finish(unit)

    unit = Unit("hardware", {})
    return Stage("hardware", run, [unit], cost="a look at every node")


def train_stage(
    name: str,
    settings: TrainStageSettings,
    build_task: Callable[[RunDirectory | None], TrainTask],
    identity: Mapping[str, Any],
    needs: tuple[str, ...] = (),
) -> Stage:
    """A training run; its weights lie at ``run.model(name)`` when it is done.

    Args:
        name: the stage, and the section of the configuration that holds its settings.
        settings: that section.
        build_task: as of :class:`~raypipe.pipeline.experiment.Training`.
        identity: what decides the result beside ``settings.training``.
        needs: the stages before it.

    """
    unit = Unit(name, {**identity, name: {"training": settings.training.identity()}})

    def run(context: StageContext) -> None:
        context.train(unit, build_task(context.run), settings)

    trained = settings.training
    length = f"{trained.steps} steps" if trained.steps else f"{trained.epochs or 1} epochs"
    cost = f"{length} of {trained.effective_batch} samples"
    training = Training(settings, build_task, identity)
    on_gpu = settings.scaling.gpus_per_worker != 0
    return Stage(name, run, [unit], needs, cost, training=training, on_gpu=on_gpu)
