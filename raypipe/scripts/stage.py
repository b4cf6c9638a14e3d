"""Stage of a script: checks the command, and hashes its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raypipe.config.validation import did_you_mean
from raypipe.graph.experiment import Stage
from raypipe.graph.source import files_from
from raypipe.graph.stages import train_stage
from raypipe.scripts import command, files
from raypipe.scripts.settings import ScriptStageSettings
from raypipe.scripts.task import ScriptTask
from raypipe.training.batching import BatchPlan, resolve
from raypipe.training.settings import TrainingSettings
from raypipe.training.tables import TRIALS

#: settings that need not reach the script: it may log as often as it likes
_FREE = {"log_every"}
_SHOWN = 40


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
        settings = settings.model_copy(
            update={"scaling": settings.scaling.model_copy(update={"workers": 1})}
        )
    own = command.flat(parameters or {})
    values = _values(name, settings, own)
    command.check_form(settings, name)
    for key in ("command", "resume", "metrics"):
        known = values - ({command.RESUME} if key != "command" else set())
        command.check_names([getattr(settings, key) or ""], known, f"{name}.{key}")
    known = values - {command.RESUME}
    command.check_names(settings.environment.values(), known, f"{name}.environment")
    hashes = files.hashes(_files(name, settings, directory), directory, f"{name}.files")
    used = _used(settings, values, hashes, directory)
    plan = _plan(settings, used)
    unused = _check_used(name, settings, own, used, plan)
    sizes = {key: None if key in unused else getattr(plan, key) for key in command.SIZES}
    training = settings.training.model_copy(update=sizes)
    settings = settings.model_copy(update={"training": training})
    task = ScriptTask(str(directory), hashes, own, used, unused)
    literals = {**(literals or {}), "files": hashes}
    stage = train_stage(name, settings, lambda *_: task, needs, reads, literals)
    shown = settings.command
    return replace(stage, workload=shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}...")


def _values(name: str, settings: ScriptStageSettings, own: Mapping[str, Any]) -> set[str]:
    """Return the names of all values. Raises ValueError if a parameter has a taken name."""
    training, plan = settings.training, BatchPlan(1, 1, 1, 1)
    settled = {*command.setting_values(settings, plan, training.steps), "threads"}
    settled |= {*command.SIZES, *command.PLACES, command.RESUME}
    named = dict.fromkeys(command.OWN, "raypipe itself")
    named |= {command.variable(each): each for each in settled}
    for parameter in own:
        default = getattr(TrainingSettings(), parameter, None)
        given = parameter in command.TRAINING and getattr(training, parameter) != default
        if parameter in command.RESERVED or given:
            where = f"{name}.training" if given else "raypipe's placeholders"
            raise ValueError(
                f"parameters.{parameter}: the name is taken by {where}; give the parameter "
                "another name"
            )
        variable = command.variable(parameter)
        if (other := named.setdefault(variable, parameter)) != parameter:
            raise ValueError(
                f"parameters.{parameter}: its environment variable {variable} is that of {other}; "
                "give the parameter another name"
            )
    return settled | set(own)


def _files(name: str, settings: ScriptStageSettings, directory: Path) -> tuple[str, ...]:
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


def _used(
    settings: ScriptStageSettings,
    values: set[str],
    hashes: Mapping[str, str],
    directory: Path,
) -> frozenset[str]:
    """Return the values that reach the script: by a placeholder, or by a variable that it names."""
    texts = [settings.command, *settings.environment.values()]
    used = {each for text in texts for each in command.placeholders(text)}
    if command.RESUME in used:
        used |= set(command.placeholders(settings.resume))
    variables = {command.variable(each): each for each in values}
    used |= {variables[each] for each in files.mentioned(variables, hashes, directory)}
    code = " ".join(command.shell_code(settings))
    used |= {variables[each] for each in files.VARIABLE.findall(code) if each in variables}
    flags = used & set(command.PRECISIONS)
    if settings.training.precision in flags or (flags and settings.training.precision == "fp32"):
        used |= {"precision"}
    return frozenset(used)


def _plan(settings: ScriptStageSettings, used: frozenset[str]) -> BatchPlan:
    """Return the batch sizes: by default those of other trainings if the script takes any."""
    sizes = {key: getattr(settings.training, key) for key in command.SIZES}
    given = {key: value for key, value in sizes.items() if value is not None}
    if {"micro_batch", "effective_batch"}.isdisjoint(used | given.keys()):
        given["micro_batch"] = 1
    return resolve([given], settings.scaling.most_workers)


def _check_used(
    name: str,
    settings: ScriptStageSettings,
    own: Mapping[str, Any],
    used: frozenset[str],
    plan: BatchPlan,
) -> frozenset[str]:
    """Return the settings that do not reach the script.

    Raises:
        ValueError: one of them was given, so that it would have no effect.

    """
    training, scaling = settings.training, settings.scaling
    lost = [(f"parameters.{each}", each, value) for each, value in own.items() if each not in used]
    for key in command.TRAINING:
        value, default = getattr(training, key), TrainingSettings.model_fields[key].default
        if key not in used and key not in own and value != default and key not in _FREE:
            lost.append((f"{name}.training.{key}", key, value))
    micro, runs, whole = (key in used for key in command.SIZES)
    undivided = plan.accumulation == 1
    reaches = {
        "micro_batch": micro or (whole and undivided),
        "accumulation": runs or (micro and whole),
        "effective_batch": whole or (micro and (undivided or runs)),
    }
    for key, is_known in reaches.items():
        if not is_known and (value := getattr(training, key) or 1) > 1:
            lost.append((f"{name}.training.{key}", key, value))
    if "workers" not in used and scaling.most_workers > 1:
        lost.append((f"{name}.scaling.workers", "workers", scaling.workers))
    if "strategy" not in used and scaling.strategy != "ddp":
        lost.append((f"{name}.scaling.strategy", "strategy", scaling.strategy))
    for step in settings.on_oom:
        key = {"bf16": "precision", "fsdp": "strategy"}.get(step, step)
        if key not in used:
            lost.append((f"{name}.on_oom", key, step))
    for key, placeholder, value in lost:
        near = did_you_mean(placeholder, sorted(used - set(own)))
        raise ValueError(
            f"{key} = {value!r}: does not reach the script{near}; put {{{placeholder}}} into "
            f"{name}.command, or let one of {name}.files read {command.variable(placeholder)}"
        )
    names = {*command.TRAINING, "strategy", *(() if "micro_batch" in used else command.SIZES)}
    names &= {column.name for column in TRIALS.columns}
    return frozenset(each for each in names if each not in used or each in own)
