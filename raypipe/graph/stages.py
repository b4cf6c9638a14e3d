"""Stages common to all experiments: the hardware check and the training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raypipe.graph import unit_training
from raypipe.graph.experiment import Stage, Training, Unit
from raypipe.hardware import bytes_text
from raypipe.training.initial_weights import find
from raypipe.training.settings import TrainStageSettings

if TYPE_CHECKING:
    from raypipe.graph.context import StageContext
    from raypipe.store.run_directory import RunDirectory
    from raypipe.training.task import JobTask


#: name of the stage that reports the hardware
HARDWARE = "hardware"


def hardware_stage() -> Stage:
    """Return the stage that reports each node's hardware; no GPU is a note, not a failure."""
    return Stage(HARDWARE, _report_hardware, reads=(), workload="a check of every node")


def _report_hardware(context: StageContext) -> None:
    for row in context.ledger.rows("environment"):
        if row["command_id"] != context.session.command_id:
            continue
        gpus = f"{row['gpu_count']} x {row['gpus']}" if row["gpus"] else "no GPU"
        context.say(
            f"{row['hostname']}: {gpus}, {row['cpus']} CPUs, "
            f"{bytes_text(row['memory_bytes'])}, torch {row['torch']}, "
            f"CUDA {row['cuda'] or 'none'}"
        )
        if row["gpus"]:
            context.device = row["gpus"]


def train_stage(
    name: str,
    settings: TrainStageSettings,
    build_task: Callable[[Any, RunDirectory | None], JobTask],
    needs: tuple[str, ...] = (),
    reads: tuple[str, ...] | None = None,
    literals: Mapping[str, Any] | None = None,
) -> Stage:
    """Return a training stage; its weights are at ``run_dir.model(name)`` afterwards.

    Args:
        name: the stage, and the section of the configuration that holds its settings.
        settings: that section.
        build_task: as in :class:`~raypipe.graph.experiment.Training`.
        needs: the stages before it.
        reads: as in :class:`~raypipe.graph.experiment.Stage`.
        literals: as in :class:`~raypipe.graph.experiment.Unit`.

    Raises:
        ConfigError: ``init_from`` names no model.

    """
    trained = settings.training
    joint = ", steps of" if trained.length_in == "epochs" else " of"
    length = f"{trained.length} {trained.length_in}{joint}"
    initial = None
    if trained.init_from is not None:
        initial = find(trained.init_from, name, f"{name}.training.init_from")
        literals = {**(literals or {}), "training.init_from": initial.sha256}
    training = Training(settings, build_task, initial=initial)
    unit = Unit(
        name,
        literals or {},
        budget=trained.length,
        budget_key=training.length_key(name),
        extensible=settings.fixed_by(trained.length) is None,
    )
    return Stage(
        name,
        _train,
        [unit],
        needs,
        reads,
        workload=f"{length} {trained.effective_batch} samples",
        training=training,
        on_gpu=settings.scaling.gpus_per_worker != 0,
    )


def _train(context: StageContext) -> None:
    (unit,), training = context.stage.units, context.stage.training
    if training is None:
        raise ValueError(f"{context.stage.name} is not a training stage")
    task = training.task(context.run_dir)
    unit_training.train(context, unit, task, training.settings, training.initial)
