"""Stage of a script, and an experiment of it alone: a configuration file is all that a user writes.

The stage checks the command and hashes the files that decide its result; its task runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from raypipe.config.settings import Settings
from raypipe.config.validation import defaults, did_you_mean
from raypipe.graph.experiment import Experiment, Stage
from raypipe.graph.identity import differences
from raypipe.graph.source import files_from
from raypipe.graph.training_stage import hardware_stage, train_stage
from raypipe.scripts import command
from raypipe.scripts.command import ScriptStageSettings
from raypipe.store.tables import Column
from raypipe.training.batching import BatchPlan, resolve
from raypipe.training.job import ExternalTask
from raypipe.training.settings import TrainingSettings
from raypipe.training.tables import TRIALS

if TYPE_CHECKING:
    from raypipe.training.ending import Ending
    from raypipe.training.job import Report, TrainingJob

_LETTERS = 32
#: settings that need not reach the script: it may log as often as it likes
_FREE = {"log_every"}
_SHOWN = 40


@dataclass(frozen=True)
class ScriptTask(ExternalTask):
    """A script as a training task.

    Args:
        directory: where the command runs, on nodes that have it; else their own directory.
        hashes: the hash of each file that decides the result.
        parameters: the parameters by dotted name.
        used: the names of the values that reach the script.
        unused: the settings that do not, which ``trials`` does not show.

    """

    directory: str
    hashes: Mapping[str, str]
    parameters: Mapping[str, Any]
    used: frozenset[str]
    unused: frozenset[str]

    def run(self, job: TrainingJob, report: Report, ending: Ending) -> dict[str, Any]:
        """Run the script to its end.

        Raises:
            ValueError: a file is not the one that the training's identity holds.
            FloatingPointError: the loss is no longer finite.
            UnitError: the script failed, with the kind of failure.

        """
        from raypipe.scripts.run import ScriptRun

        directory = Path(self.directory)
        if not directory.is_dir():
            directory = Path.cwd()
        for name, digest in self.hashes.items():
            path = directory / name
            if not path.is_file() or _digest(path) != digest:
                raise ValueError(
                    f"{name}: in {directory} of this node it is missing, or has changed since the "
                    "command started; put it on a shared file system, or submit the command with "
                    "its working directory (ray job submit --working-dir)"
                )
        return ScriptRun(job, self.parameters, self.used, report).run(directory, ending)

    def columns(self) -> Mapping[str, Any]:
        """Return the parameters as ``param_NAME``, and no settings that the script ignores."""
        own = {f"param_{name.replace('.', '_')}": value for name, value in self.parameters.items()}
        return {**dict.fromkeys(self.unused), **own}


def script_stage(
    name: str,
    settings: ScriptStageSettings,
    parameters: Mapping[str, Any] | None = None,
    needs: tuple[str, ...] = (),
    reads: tuple[str, ...] | None = None,
    literals: Mapping[str, Any] | None = None,
) -> Stage:
    """Return a stage that trains with a script; its output is at ``run_dir.artifact(name)``.

    Args:
        name: the stage, and the section of the configuration that holds its settings.
        settings: that section.
        parameters: further placeholders, which the settings that the stage reads must hold.
        needs: the stages before it.
        reads: as in :class:`~raypipe.graph.experiment.Stage`.
        literals: as in :class:`~raypipe.graph.experiment.Unit`.

    Raises:
        ValueError: an unknown placeholder, a value that does not reach the script, or a file that
            does not exist.

    """
    directory = Path.cwd()
    if settings.scaling.workers == "auto":
        settings = settings.changed("scaling", workers=1)
    own = command.flat(parameters or {})
    for parameter in own:
        if parameter in {*command.TRAINING, *command.RESERVED}:
            raise ValueError(f"parameters.{parameter}: raypipe has a placeholder of this name")
    settled = command.setting_values(settings, BatchPlan(1, 1, 1, 1), settings.training.steps)
    values = {*settled, *command.RESERVED, *own} - {command.RESUME}
    used = command.placeholders(settings, values, name)
    hashes = _hashes(_files(name, settings, directory), directory, f"{name}.files")
    flags = used & {*command.PRECISIONS}
    used |= {"precision"} if flags and settings.training.precision in {*flags, "fp32"} else set()
    given = {k: v for k in command.SIZES if (v := getattr(settings.training, k)) is not None}
    if {"micro_batch", "effective_batch"}.isdisjoint(used | given.keys()):
        given["micro_batch"] = 1  # by default the sizes of other trainings, if it takes any
    plan = resolve([given], settings.scaling.worker_count)
    _check_used(name, settings, own, used, plan)
    unused = {*TrainingSettings.model_fields, "strategy"} - (used - own.keys())
    unused -= {*command.SIZES} if "micro_batch" in used else set()
    sizes = {key: None if key in unused else getattr(plan, key) for key in command.SIZES}
    settings = settings.changed("training", **sizes)
    hidden = frozenset(unused & {column.name for column in TRIALS.columns})
    task = ScriptTask(str(directory), hashes, own, frozenset(used), hidden)
    literals = {**(literals or {}), "files": hashes}
    stage = train_stage(name, settings, lambda *_: task, needs, reads, literals)
    shown = settings.command
    return replace(stage, workload=shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}...")


def _files(name: str, settings: ScriptStageSettings, directory: Path) -> tuple[str, ...]:
    """Return the files of the settings; by default the script and the modules next to it."""
    if settings.files is not None:
        return settings.files
    script = command.script_of(settings.command, directory)
    if script is None:
        raise ValueError(
            f"{name}.files: the command names no script below {directory}; list the files whose "
            "content decides the result ([] if there are none)"
        )
    modules = files_from(directory / script, Path(script).stem).values()
    near = (path.relative_to(directory) for path in modules if path.is_relative_to(directory))
    return tuple(dict.fromkeys([script, *(path.as_posix() for path in near)]))


def _hashes(patterns: Iterable[str], directory: Path, key: str) -> dict[str, str]:
    """Return the hash of each file by its name, as the patterns of the setting ``key`` give it.

    Raises:
        ValueError: a file does not exist, or a pattern has none.

    """
    hashes: dict[str, str] = {}
    for pattern in patterns:
        paths = [Path(pattern)] if (directory / pattern).is_file() else []
        if not paths and not Path(pattern).is_absolute():
            files = (path for path in sorted(directory.glob(pattern)) if path.is_file())
            paths = [p.relative_to(directory) for p in files if "__pycache__" not in p.parts]
        if not paths:
            raise ValueError(f"{key}: {pattern}: there is no such file in {directory}")
        hashes |= {path.as_posix(): _digest(directory / path) for path in paths}
    return hashes


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_LETTERS]


def _check_used(
    name: str,
    settings: ScriptStageSettings,
    own: Mapping[str, Any],
    used: set[str],
    plan: BatchPlan,
) -> None:
    """Raise ValueError if a value was given that does not reach the script, and has no effect."""
    scaling = {"strategy", "workers"} if settings.scaling.worker_count > 1 else {"strategy"}
    sections: dict[str, Any] = dict.fromkeys(("training", "loader", "memory_trial"), True)
    plain = settings.model_dump(mode="json", include={**sections, "scaling": scaling})
    unasked = {f"training.{key}" for key in (*command.SIZES, *_FREE)}
    given = [(f"parameters.{each}", each, value) for each, value in own.items()]
    given += [
        (f"{name}.{key}", key.removeprefix("training.").removeprefix("scaling."), value)
        for key, (_, value) in differences(defaults(ScriptStageSettings), plain).items()
        if value is not None and key not in unasked
    ]
    for step in settings.on_oom:
        placeholder = {"bf16": "precision", "fsdp": "strategy"}.get(step, step)
        given.append((f"{name}.on_oom", placeholder, step))
    micro, runs, whole = (key in used for key in command.SIZES)
    undivided = plan.accumulation == 1
    reaches = {
        "micro_batch": micro or (whole and undivided),
        "accumulation": runs or (micro and whole),
        "effective_batch": whole or (micro and (undivided or runs)),
    }
    sizes = {key: getattr(settings.training, key) or 1 for key in command.SIZES}
    given += [(f"{name}.training.{key}", key, size) for key, size in sizes.items() if size > 1]
    for key, placeholder, value in given:
        if reaches.get(placeholder, placeholder in used):
            continue
        if placeholder not in {*own, *command.TRAINING, *command.RESERVED}:
            raise ValueError(f"{key} = {value!r}: does not apply to a script; remove it")
        near = did_you_mean(placeholder, sorted(used - set(own)))
        raise ValueError(
            f"{key} = {value!r}: does not reach the script{near}; put {{{placeholder}}} into "
            f"{name}.command"
        )


class ScriptExperiment(Settings):
    """A training with a script."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    """Values of your own, by any name: placeholders of the command, and keys of `matrix` and
    `sweep.axes` (`parameters.dropout`).
    """
    train: ScriptStageSettings
    """The command, and the training settings."""


def _stages(settings: ScriptExperiment) -> Sequence[Stage]:
    return [hardware_stage(), script_stage("train", settings.train, settings.parameters)]


METRICS = (
    Column("eval_loss", "real", "Held-out loss.", better="lower"),
    Column("eval_accuracy", "real", "Held-out accuracy.", better="higher"),
)
EXPERIMENT = Experiment("scripts", 1, ScriptExperiment, _stages, step_metrics=METRICS)
