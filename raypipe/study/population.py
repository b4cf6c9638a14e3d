"""Paused trials of Ray Tune, and populations: trials that continue from another one's state.

A trial's state is the folder of its checkpoints. With its logged steps and the settings that it had
from which step on (``lineage.json``), it is all that another trial needs to go on from it. A trial
that takes over a state takes over these, too: its rows are then those of the training that led to
its model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyarrow import fs as arrow_fs

from raypipe.config.axes import AxisSettings
from raypipe.errors import ConfigError
from raypipe.graph.experiment import Training
from raypipe.scripts.command import ScriptStageSettings
from raypipe.store import tables as results
from raypipe.store.ledger import Row
from raypipe.store.run_directory import RunDirectory
from raypipe.study.space import rounded
from raypipe.study.sweep_settings import SweepSettings
from raypipe.training.job import TrainingJob, schedule_trace

#: settings of a training that may change while it runs; all others decide what a checkpoint holds,
#: or how many steps it has taken
CHANGEABLE = ("learning_rate", "min_lr_ratio", "weight_decay", "clip_norm")
_FILE = "lineage.json"


@dataclass
class Lineage:
    """The trial whose state it is, its logged steps, and its settings from which step on."""

    trial_id: str = ""
    settings: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, run: RunDirectory, trial_id: str) -> Lineage:
        """Return the lineage of a trial; empty if it has not started."""
        path = f"{run.checkpoints(trial_id)}/{_FILE}"
        return cls(**json.loads(run.read(path))) if run.exists(path) else cls()

    @property
    def values(self) -> Row:
        """The settings that the trial has now."""
        return {k: v for k, v in (self.settings or [{}])[-1].items() if k in CHANGEABLE}

    @property
    def columns(self) -> Row:
        """The columns of ``trials`` of a training that has had several settings: those it kept.

        Settings that changed have no value. The others may be those of the trial that it took over.
        """
        if len(self.settings) < 2:
            return {}
        kept = {k: v for k, v in self.values.items() if all(s[k] == v for s in self.settings)}
        history = {"settings_history": json.dumps(self.settings)}
        return {**dict.fromkeys(self.values), **kept, **history}

    def write(self, run: RunDirectory) -> None:
        """Write it to the trial's folder."""
        path = f"{run.checkpoints(self.trial_id)}/{_FILE}"
        run.write(path, json.dumps(vars(self)).encode())


def take_over(
    job: TrainingJob, values: Mapping[str, Any], given: tuple[str, arrow_fs.FileSystem] | None
) -> Lineage:
    """Make a state that of a trial, which goes on from it with these settings.

    Args:
        job: the trial.
        values: its settings from now on, those that may change.
        given: the folder of the state, that of another trial or its own; None for what it has.

    """
    from raypipe.training.checkpoint import CheckpointStore  # torch is slow to import

    run, own = job.run_dir, job.run_dir.checkpoints(job.trial_id)
    if given is not None:
        run.delete(own)
        run.fs.create_dir(own)
        arrow_fs.copy_files(
            given[0], own, source_filesystem=given[1], destination_filesystem=run.fs
        )
    lineage, store = Lineage.of(run, job.trial_id), CheckpointStore(run, job.trial_id)
    rows = [{**row, "trial_id": job.trial_id} for row in lineage.steps]
    if rows:
        results.write_table(run, job.steps_table, rows, job.run_id, job.trial_id)
    is_anothers = lineage.trial_id not in ("", job.trial_id)
    if is_anothers or lineage.values != values:
        store.adopt(schedule_trace(job, job.phases))
        source = {"from": lineage.trial_id} if is_anothers else {}
        step = max(store.steps, default=0)
        lineage.settings.append({"step": step, **source, **values})
    lineage = Lineage(job.trial_id, lineage.settings, rows)
    lineage.write(run)
    return lineage


def changeable(axes: Mapping[str, AxisSettings]) -> dict[str, AxisSettings]:
    """Return the axes by the name of the setting, without the section."""
    return {key.rpartition(".")[2]: axis for key, axis in axes.items()}


def within(axes: Mapping[str, AxisSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of the axes by name, inside their ranges and with few digits."""
    return {
        name: values[name] if axis.listed else rounded(axis, float(values[name]))
        for name, axis in axes.items()
    }


def check_pauses(
    sweep: SweepSettings, axes: Mapping[str, AxisSettings], training: Training, where: str
) -> None:
    """Reject a training that Ray Tune cannot pause, or cannot continue with other settings.

    Args:
        sweep: the section, whose scheduler may pause trials.
        axes: its axes by full key.
        training: the swept training.
        where: the file.

    Raises:
        ConfigError: one of them.

    """
    if not sweep.pauses:
        return
    name, stage = sweep.scheduler_name, sweep.stage
    about = f"{where}: sweep.scheduler = {name}: pauses trials and continues them from checkpoints"
    if isinstance(training.settings, ScriptStageSettings):
        raise ConfigError(f"{about}, and {stage} is a script, which writes its own; take asha")
    if (workers := training.settings.scaling.worker_count) > 1:
        raise ConfigError(
            f"{about}, and {stage}.scaling.workers = {workers}: Tune cannot pause a group of "
            "workers; set it to 1, or take asha"
        )
    if not sweep.is_population:
        return
    if training.settings.from_sweep:
        raise ConfigError(
            f"{where}: {stage}.from_sweep = true: the best training of a population ({name}) has "
            "had several settings; take its model (init_from), or another scheduler"
        )
    allowed = [f"{stage}.training.{key}" for key in CHANGEABLE]
    for key in axes:
        if key not in allowed:
            raise ConfigError(
                f"{where}: sweep.axes.{key}: cannot change during a training, which "
                f"{name} does with every axis: a checkpoint with one value does not continue with "
                f"another (allowed: {', '.join(allowed)}; asha and hyperband take any axis)"
            )
