"""raypipe: a parallel experiment runner on Ray.

One experiment, one YAML file, one command; every result is a row in Parquet.

``import raypipe as rp`` gives the commands as functions (``rp.run``, ``rp.map``) and what
experiments are made of (``rp.Experiment``). Names are imported on first use, so the
import itself is quick.
"""

from raypipe import import_path

import_path.protect()  # before anything else is imported

from importlib import import_module  # noqa: E402
from importlib.metadata import PackageNotFoundError, version  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from raypipe.api import Best, Run, RunFailedError, fit, map, open, plan, replay, run, sweep
    from raypipe.config.settings import Operational, Settings
    from raypipe.errors import ConfigError, UnitError
    from raypipe.graph.context import StageContext
    from raypipe.graph.experiment import Experiment, Stage, Unit
    from raypipe.graph.launcher import PoolOptions
    from raypipe.graph.training_stage import hardware_stage, train_stage
    from raypipe.graph.unit_logs import Failure
    from raypipe.scripts.command import ScriptStageSettings
    from raypipe.scripts.experiment import script_stage
    from raypipe.store.run_directory import RunDirectory
    from raypipe.store.tables import Column, Table
    from raypipe.training.settings import TrainStageSettings
    from raypipe.training.task import Loss, TrainTask

__all__ = [
    "Best",
    "Column",
    "ConfigError",
    "Experiment",
    "Failure",
    "Loss",
    "Operational",
    "PoolOptions",
    "Run",
    "RunDirectory",
    "RunFailedError",
    "ScriptStageSettings",
    "Settings",
    "Stage",
    "StageContext",
    "Table",
    "TrainStageSettings",
    "TrainTask",
    "Unit",
    "UnitError",
    "__version__",
    "fit",
    "hardware_stage",
    "map",
    "open",
    "plan",
    "replay",
    "run",
    "script_stage",
    "sweep",
    "train_stage",
]

_MODULES = {
    "raypipe.api": (
        *("Best", "Run", "RunFailedError", "fit", "map", "open", "plan", "replay", "run", "sweep"),
    ),
    "raypipe.config.settings": ("Operational", "Settings"),
    "raypipe.errors": ("ConfigError", "UnitError"),
    "raypipe.graph.context": ("StageContext",),
    "raypipe.graph.experiment": ("Experiment", "Stage", "Unit"),
    "raypipe.graph.launcher": ("PoolOptions",),
    "raypipe.graph.training_stage": ("hardware_stage", "train_stage"),
    "raypipe.graph.unit_logs": ("Failure",),
    "raypipe.scripts.command": ("ScriptStageSettings",),
    "raypipe.scripts.experiment": ("script_stage",),
    "raypipe.store.run_directory": ("RunDirectory",),
    "raypipe.store.tables": ("Column", "Table"),
    "raypipe.training.settings": ("TrainStageSettings",),
    "raypipe.training.task": ("Loss", "TrainTask"),
}

try:
    __version__ = version("raypipe-runner")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import a name of the public API. Raises AttributeError if there is none."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
