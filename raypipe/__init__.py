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
    from raypipe import stats
    from raypipe.api import Run, RunFailedError, fit, map, open, plan, replay, run, sweep
    from raypipe.config.settings import Operational, Settings
    from raypipe.errors import ConfigError, UnitError
    from raypipe.graph.context import StageContext
    from raypipe.graph.experiment import Experiment, Stage, Unit
    from raypipe.graph.identity import fingerprint
    from raypipe.graph.launcher import PoolOptions, TaskPool, TaskResult
    from raypipe.graph.training_stage import hardware_stage, train_stage
    from raypipe.graph.unit_logs import Failure
    from raypipe.report import formatting, parts, plots
    from raypipe.scripts.command import ScriptStageSettings
    from raypipe.scripts.experiment import script_stage
    from raypipe.store import artifacts
    from raypipe.store.cache import Cache
    from raypipe.store.call_files import output_dir
    from raypipe.store.run_directory import RunDirectory
    from raypipe.store.tables import Column, Table
    from raypipe.training import keyed_random, precision, weights
    from raypipe.training.schedule import Phase
    from raypipe.training.settings import TrainingSettings, TrainStageSettings
    from raypipe.training.task import Loss, StepContext, TrainTask

#: the commands, and what they return
__all__ = ["Run", "RunFailedError", "fit", "map", "open", "plan", "replay", "run", "sweep"]
#: functions
__all__ += ["output_dir"]
#: experiments
__all__ += ["Experiment", "Operational", "RunDirectory", "Settings", "Stage", "StageContext"]
__all__ += ["ScriptStageSettings", "Unit", "hardware_stage", "script_stage", "train_stage"]
__all__ += ["ConfigError", "Failure", "PoolOptions", "TaskPool", "TaskResult", "UnitError"]
__all__ += ["Cache", "Column", "Table", "artifacts", "fingerprint", "stats"]
#: trainings
__all__ += ["Loss", "Phase", "StepContext", "TrainStageSettings", "TrainTask", "TrainingSettings"]
__all__ += ["keyed_random", "precision", "weights"]
#: sections of the report
__all__ += ["formatting", "parts", "plots"]

#: the module of each name; a public module is its own
_MODULES = {
    name: module
    for module, names in {
        "raypipe.api": "Run RunFailedError fit map open plan replay run sweep",
        "raypipe.config.settings": "Operational Settings",
        "raypipe.errors": "ConfigError UnitError",
        "raypipe.graph.context": "StageContext",
        "raypipe.graph.experiment": "Experiment Stage Unit",
        "raypipe.graph.identity": "fingerprint",
        "raypipe.graph.launcher": "PoolOptions TaskPool TaskResult",
        "raypipe.graph.training_stage": "hardware_stage train_stage",
        "raypipe.graph.unit_logs": "Failure",
        "raypipe.report.formatting": "formatting",
        "raypipe.report.parts": "parts",
        "raypipe.report.plots": "plots",
        "raypipe.scripts.command": "ScriptStageSettings",
        "raypipe.scripts.experiment": "script_stage",
        "raypipe.stats": "stats",
        "raypipe.store.artifacts": "artifacts",
        "raypipe.store.cache": "Cache",
        "raypipe.store.call_files": "output_dir",
        "raypipe.store.run_directory": "RunDirectory",
        "raypipe.store.tables": "Column Table",
        "raypipe.training.keyed_random": "keyed_random",
        "raypipe.training.precision": "precision",
        "raypipe.training.schedule": "Phase",
        "raypipe.training.settings": "TrainStageSettings TrainingSettings",
        "raypipe.training.task": "Loss StepContext TrainTask",
        "raypipe.training.weights": "weights",
    }.items()
    for name in names.split()
}

try:
    __version__ = version("raypipe-runner")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import a name of the public API. Raises AttributeError if there is none."""
    if name not in _MODULES:
        raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
    module = import_module(_MODULES[name])
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)
