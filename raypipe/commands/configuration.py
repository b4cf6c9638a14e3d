"""Configuration of a command, assembled from its file, overrides and the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from pydantic import BaseModel, Field, create_model

from raypipe.config.document import Document, parse, read
from raypipe.config.levels import defaults, settings_of
from raypipe.config.matrix import MatrixSettings
from raypipe.config.overrides import parse_overrides
from raypipe.config.profiles import CONDITIONS, profile_name
from raypipe.config.settings import Level, Operational, Settings
from raypipe.hardware import Hardware
from raypipe.pipeline.configuration import Configuration, load_experiment
from raypipe.pipeline.experiment import Experiment
from raypipe.sweep.settings import SweepSettings
from raypipe.tracking import TrackerName

__all__ = ["parse", "read", "resolve", "settings_model"]


class CommonSettings(Settings):
    """Sections that every experiment has in addition to its own."""

    matrix: Operational[MatrixSettings | None] = Field(
        None, description="Points at which the whole experiment runs, in one run directory."
    )
    sweep: Operational[SweepSettings | None] = Field(
        None, description="Sweep over settings of a training stage."
    )
    store: Operational[str | None] = Field(
        None,
        description="Folder or URI where run directories share results; by default RAYPIPE_STORE.",
    )
    tracking: Operational[tuple[TrackerName, ...]] = Field(
        (), description="Trackers that receive a copy of the metrics."
    )


def resolve(
    document: Document,
    overrides: Sequence[str],
    profile: str,
    nodes: Sequence[Hardware],
) -> Configuration:
    """Return the configuration for this hardware.

    Levels, the higher wins: command line, profile, file, the experiment's defaults.

    Args:
        document: the configuration file.
        overrides: ``dotted.key=value`` from the command line, the value in YAML.
        profile: ``auto``, or the name of a profile.
        nodes: the hardware from which ``auto`` selects the profile.

    Raises:
        ConfigError: every mistake, in one message.

    """
    experiment = load_experiment(document.experiment, document.origin)
    model = settings_model(experiment)
    name = profile_name(document.profiles, profile, nodes)
    profile_values = document.profiles.get(name, {}).items()
    levels = [
        Level("command line", parse_overrides(overrides)),
        Level(
            f"{document.origin}, profile {name}",
            {key: value for key, value in profile_values if key not in CONDITIONS},
        ),
        Level(document.origin, document.values),
        Level("default", defaults(model)),
    ]
    settings, levels = settings_of(levels, model)
    return Configuration(
        document.origin, experiment, document.experiment, name, model, settings, levels
    )


@cache
def settings_model(experiment: Experiment) -> type[BaseModel]:
    """Return the settings of an experiment together with the common sections."""
    return create_model(
        experiment.settings.__name__, __base__=(experiment.settings, CommonSettings)
    )
