"""Configuration of a command: an experiment with validated settings, and their origins."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from raypipe.config.levels import nested, settings_of
from raypipe.config.settings import Level
from raypipe.errors import ConfigError
from raypipe.pipeline.experiment import Experiment, Stage
from raypipe.pipeline.identity import compose


@dataclass(frozen=True)
class Configuration:
    """A valid configuration: the experiment, its settings, and the levels they came from."""

    origin: str
    experiment: Experiment
    module: str
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
        return {"experiment": self.module, **self.settings.model_dump(mode="json")}


def load_experiment(module: str, origin: str) -> Experiment:
    """Return the ``EXPERIMENT`` of a module, or of the module ``experiment`` in a package.

    A package whose ``__init__`` imports nothing keeps tasks that use one of its modules light.
    The current directory comes first on ``sys.path``.

    Raises:
        ConfigError: the module cannot be imported, or has no experiment.

    """
    here = str(Path.cwd())
    if sys.path[0] != here:
        sys.path.insert(0, here)
    try:
        loaded = importlib.import_module(module)
        if not hasattr(loaded, "EXPERIMENT") and _has_module(loaded, "experiment"):
            loaded = importlib.import_module(f"{module}.experiment")
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(
            f"{origin}: experiment = {module}: cannot be imported "
            f"({type(error).__name__}: {error}); run from the directory that contains it"
        ) from error
    experiment = getattr(loaded, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"{origin}: experiment = {module}: the module has no EXPERIMENT = Experiment(...)"
        )
    return experiment


def _has_module(package: ModuleType, name: str) -> bool:
    """Whether a package has a module of this name."""
    return any(module.name == name for module in iter_modules(getattr(package, "__path__", ())))
