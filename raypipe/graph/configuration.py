"""Configuration of a command: an experiment with validated settings, and their origins."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from raypipe import import_path
from raypipe.config import shipped
from raypipe.config.settings import Level, NotIdentity
from raypipe.config.validation import did_you_mean, nested, settings_of
from raypipe.errors import ConfigError, trace_of
from raypipe.graph.experiment import Experiment, Stage, Unit, Units, in_order
from raypipe.graph.identity import Identity, SettingsView, fingerprint, values_of
from raypipe.graph.source import SourceCode
from raypipe.training.settings import LENGTH_KEYS


@dataclass(frozen=True)
class Configuration:
    """A valid configuration: the experiment, its settings, and the levels they came from.

    ``named`` is the key of the file that names the experiment, with its value. ``source`` reads the
    experiment's source code.
    """

    origin: str
    experiment: Experiment
    named: Mapping[str, str]
    source: Callable[[], SourceCode]
    profile: str
    model: type[BaseModel]
    settings: Any
    levels: Sequence[Level]

    def with_values(self, values: Mapping[str, Any], origin: str) -> Configuration:
        """Return this configuration with values by dotted key above all others.

        Raises:
            ConfigError: a value is not valid.

        """
        settings, levels = settings_of([Level(origin, nested(values)), *self.levels], self.model)
        return replace(self, settings=settings, levels=levels)

    def stages(self) -> list[Stage]:
        """Return the experiment's stages, their units with identities. Raises ConfigError."""
        try:
            return compose(self.experiment, self.settings, self.experiment.stages(self.settings))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{self.origin}: {error}") from error

    def resolved(self) -> dict[str, Any]:
        """Return every key with its final value, as the content of a configuration file."""
        return {**self.named, **self.settings.model_dump(mode="json")}


def compose(experiment: Experiment, settings: BaseModel, stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages with the identity of every unit, and the settings that trainings read.

    Raises:
        ValueError: stages that cannot be ordered, or a stage that reads an unknown key.

    """
    composed: dict[str, Stage] = {}
    names = {stage.name for stage in stages}
    for stage in in_order(stages):
        reads = stage.reads
        if reads is None:
            reads = _reads_by_default(settings, names - {stage.name})
        view = SettingsView(settings, reads, stage.name)
        shared = {
            "experiment": experiment.name,
            "version": experiment.version,
            **_without_length(values_of(settings, view), stage),
        }
        hashed = fingerprint(shared)
        needed = {need: composed[need].fingerprint for need in stage.needs}
        budgets = {need: [u.budget for u in composed[need].units] for need in stage.needs}
        extents = {need: _extents(composed[need]) for need in stage.needs}
        listed: list[Unit] = []
        is_listed = not isinstance(stage.units, Units)
        for unit in stage.units or (Unit(stage.name),) if is_listed else ():
            needs = needed if unit.needs is None else {need: needed[need] for need in unit.needs}
            literals = {**unit.literals, **({"budgets": budgets} if stage.always_rerun else {})}
            found = {name: each for need in needs for name, each in extents[need].items()}
            identity = Identity(shared, hashed, literals, needs)
            listed.append(replace(unit, identity=identity, extents=found))
        units: Sequence[Unit] = listed
        if isinstance(stage.units, Units):
            units = stage.units.composed(partial(Identity, shared, hashed, needs={}))
        training = stage.training
        if training is not None:
            training = replace(training, settings_view=view)
        composed[stage.name] = replace(stage, units=units, reads=reads, training=training)
    return [composed[stage.name] for stage in stages]


def _reads_by_default(settings: BaseModel, others: Set[str]) -> tuple[str, ...]:
    """Return every field that is not the section of another stage."""
    return tuple(
        name
        for name, field in type(settings).model_fields.items()
        if name not in others and not any(isinstance(m, NotIdentity) for m in field.metadata)
    )


def _without_length(values: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """Return a training's settings without its length if that is the budget of its unit."""
    training = stage.training
    if training is None:
        return values
    if {unit.budget_key for unit in stage.units} - {training.length_key(stage.name)}:
        return values
    own = dict(values.get(stage.name, {}))
    rest = {k: v for k, v in own.get("training", {}).items() if k not in LENGTH_KEYS}
    own["training"] = {**rest, "length": training.settings.training.length_in}
    return {**values, stage.name: own}


def _extents(stage: Stage) -> dict[str, Sequence[int]]:
    """Return the budgets of a stage and of those that it needs; not of units that cannot grow."""
    found = {name: budgets for unit in stage.units for name, budgets in unit.extents.items()}
    own = [unit.budget for unit in stage.units]
    return {**found, stage.name: own} if any(budget != 1 for budget in own) else found


def load_experiment(module: str, origin: str) -> Experiment:
    """Return the ``EXPERIMENT`` of a module, or of the module ``experiment`` in a package.

    A package whose ``__init__`` imports nothing keeps tasks that use one of its modules light.
    The current directory comes first on ``sys.path``, then folders of configurations that were
    read. ``experiments.NAME`` is the user's own, if there is one, or comes with raypipe.

    Raises:
        ConfigError: the module cannot be imported, or has no experiment.

    """
    name = shipped.importable(module)
    if missing := shipped.missing_packages(name):
        raise ConfigError(
            f"{origin}: experiment = {module}: the experiments that come with raypipe need "
            f"{', '.join(missing)}; pip install 'raypipe-runner[workloads]'"
        )
    loaded = import_module(name, origin, "experiment")
    is_package = not hasattr(loaded, "EXPERIMENT") and hasattr(loaded, "__path__")
    if is_package and find_spec(f"{name}.experiment") is not None:
        loaded = import_module(f"{name}.experiment", origin, "experiment")
    experiment = getattr(loaded, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"{origin}: experiment = {module}: the module has no EXPERIMENT = Experiment(...) "
            f"({getattr(loaded, '__file__', None) or 'a folder without __init__.py'})"
        )
    return experiment


def import_module(module: str, origin: str, key: str) -> ModuleType:
    """Return a module of the user's; ``key`` is the configuration key that names it.

    The current directory comes first on ``sys.path``.

    Raises:
        ConfigError: it cannot be imported.

    """
    import_path.prefer()
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        missing = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
        if missing and module.startswith(missing):
            near = did_you_mean(module, [path.stem for path in Path.cwd().glob("*.py")])
            advice = (
                f"run from the directory that contains it, or move the configuration there{near}"
            )
        elif isinstance(error, SyntaxError):
            advice = f"line {error.lineno} of {error.filename}"
        else:
            install = "; install it, or correct the name" if missing else ""
            advice = f"raised at {trace_of(error).frame or 'an unknown place'}{install}"
        raise ConfigError(
            f"{origin}: {key} = {module}: cannot be imported ({reason}); {advice}"
        ) from error
    _refuse_another(loaded, f"{origin}: {key} = {module}")
    return loaded


def _refuse_another(loaded: ModuleType, where: str) -> None:
    """Refuse a module that Python had imported before, in place of the one that comes first.

    Raises:
        ConfigError: both files, and what to do.

    """
    top = loaded.__name__.partition(".")[0]
    used = getattr(sys.modules.get(top), "__file__", None)
    first = Path(os.path.relpath(sys.path[0]))
    for own in (first / f"{top}.py", first / top / "__init__.py"):
        if own.is_file() and (used is None or Path(used).resolve() != own.resolve()):
            raise ConfigError(
                f"{where}: {used or f'the module {top} of Python'} was imported before {own}, "
                f"which has the same name; rename {own}, and give the new name"
            )
