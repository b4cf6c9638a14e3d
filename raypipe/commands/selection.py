"""The stages that a command runs, and the checks before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.hardware import Hardware
from raypipe.pipeline.configuration import Configuration
from raypipe.pipeline.experiment import Stage, in_order, with_needs
from raypipe.sweep.stage import NAME as SWEEP
from raypipe.sweep.stage import with_sweep
from raypipe.training.requirements import obstacles
from raypipe.training.settings import TrainStageSettings


def stages_of(
    configuration: Configuration, only: Sequence[str], nodes: Sequence[Hardware]
) -> list[Stage]:
    """Return the wanted stages and what they need, including the sweep. Raises ConfigError."""
    stages = in_order(with_sweep(configuration, nodes))
    names = [stage.name for stage in stages]
    for name in only:
        if name not in names:
            if name == SWEEP:
                raise ConfigError(
                    f"{configuration.origin}: has no sweep: give it a section `sweep` with "
                    "stage and axes (docs/sweeps.md)"
                )
            raise ConfigError(
                f"--only {name}: unknown stage{did_you_mean(name, names)} "
                f"(there are: {', '.join(names)})"
            )
    return with_needs(stages, only) if only else stages


def check_training(configuration: Configuration, nodes: Sequence[Hardware]) -> None:
    """Reject a training that the hardware cannot run. Raises ConfigError."""
    for name, section in configuration.settings:
        if not isinstance(section, TrainStageSettings):
            continue
        for obstacle in obstacles(name, section, nodes):
            raise ConfigError(
                f"{configuration.origin}: {obstacle.key} = {obstacle.value}: {obstacle.reason}; "
                f"{obstacle.advice}"
            )
