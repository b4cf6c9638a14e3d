"""Trackers: copies of training curves and settings for TensorBoard, MLflow and Weights & Biases.

The tables of the run directory are the record. A tracker has one run per trial, or per call of a
function, which is found again when the run directory is continued.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Protocol

from raypipe.errors import ConfigError
from raypipe.integrations.target import (
    Setting,
    Target,
    finite_numbers,
    mlflow_server,
    wandb_is_offline,
)
from raypipe.redaction import HIDDEN, encodable, is_secret, without_credentials

if TYPE_CHECKING:  # loading pyarrow takes as long as all of ``raypipe --help``
    from raypipe.store.run_directory import RunDirectory

TrackerName = Literal["tensorboard", "mlflow", "wandb"]

log = logging.getLogger(__name__)

_PACKAGES: Mapping[TrackerName, Sequence[str]] = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
}
# The packages read these variables on import. Nothing is sent to their vendors, and a server
# that is down delays a training by seconds, not by the minutes of MLflow's retries.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "WANDB_ERROR_REPORTING": "false",
}
#: columns of the table ``trials`` that are settings, not measurements
_SETTINGS = (
    *("stage", "trained_stage", "kind", "reference", "device", "workers", "strategy"),
    *("micro_batch", "accumulation", "effective_batch"),
    *("precision", "gradient_checkpointing", "compile"),
)


class TrialTracker(Protocol):
    """A tracker's run for one trial, created or found by the constructor."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a training step; a step that is repeated after a restart is shown once."""

    def end(
        self,
        status: str,
        settings: Mapping[str, Setting],
        metrics: Mapping[str, float],
        steps: int,
    ) -> None:
        """Record the outcome and close the run; ``metrics`` are those of all ``steps``."""


class Trackers(AbstractContextManager["Trackers"]):
    """Forward logged rows to every tracker of a command; its end closes them.

    A trial may be logged again after ``end``. Likely secrets are not logged.

    Raises:
        ConfigError: see ``check``.

    """

    def __init__(
        self,
        names: Sequence[TrackerName],
        run: RunDirectory,
        run_id: str,
        experiment: str,
        configuration: Mapping[str, Any],
    ) -> None:
        check(names, run)
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        self._target = Target(run, run_id, experiment, flat(configuration))
        self._lock = Lock()
        self._kinds: dict[TrackerName, Callable[[Target, str], TrialTracker]] = {}
        self._trials: dict[tuple[TrackerName, str], TrialTracker] = {}
        for name in names:
            with self._sparing_the_training(name):
                self._kinds[name] = _load(name)

    def log(self, trial_id: str, row: Mapping[str, Any]) -> None:
        """Log the finite numbers of a row of the table ``steps``."""
        metrics = finite_numbers(row)
        step = int(metrics.pop("step"))
        with self._lock:
            for name in list(self._kinds):
                with self._sparing_the_training(name):
                    self._trial(name, trial_id).log(step, metrics)

    def end(self, trial_id: str, row: Mapping[str, Any]) -> None:
        """Log a row of the table ``trials``: settings, status, and measurements as ``final/``."""
        chosen = {name: row[name] for name in _SETTINGS if name in row}
        settings = flat({**chosen, **(row.get("point") or {})})
        measured = {name: value for name, value in row.items() if name not in _SETTINGS}
        metrics = {f"final/{name}": value for name, value in finite_numbers(measured).items()}
        self._end(trial_id, str(row["status"]), settings, metrics)

    def call(
        self, name: str, status: str, arguments: Mapping[str, Any], returned: Mapping[str, Any]
    ) -> None:
        """Log a call of a function: its arguments, and the finite numbers of what it returned."""
        self._end(name, status, flat(arguments), finite_numbers(returned))

    def _end(
        self,
        trial_id: str,
        status: str,
        settings: Mapping[str, Setting],
        metrics: Mapping[str, float],
    ) -> None:
        steps = int(metrics.get("final/steps", 0))
        with self._lock:
            for name in list(self._kinds):
                with self._sparing_the_training(name):
                    self._trial(name, trial_id).end(status, settings, metrics, steps)
                    del self._trials[name, trial_id]

    def __exit__(self, *error: object) -> None:
        """Close all runs; trials that did not end are recorded as interrupted."""
        for trial_id in {trial_id for _, trial_id in self._trials}:
            self.end(trial_id, {"status": "interrupted"})

    def _trial(self, name: TrackerName, trial_id: str) -> TrialTracker:
        if (name, trial_id) not in self._trials:
            self._trials[name, trial_id] = self._kinds[name](self._target, trial_id)
        return self._trials[name, trial_id]

    @contextmanager
    def _sparing_the_training(self, name: TrackerName) -> Iterator[None]:
        """Disable the tracker for this command if the body raises.

        Its package may raise anything (disk full, server down, a bug), and hours of training must
        not end because of a copy of the run directory. This is the one place that catches every
        exception.
        """
        try:
            yield
        except Exception as error:
            self._kinds.pop(name, None)
            self._trials = {key: trial for key, trial in self._trials.items() if key[0] != name}
            log.warning(
                "tracking: %s failed and is disabled for this command; the tables of the "
                "run are complete: %s: %s",
                *(name, type(error).__name__, without_credentials(str(error))),
            )


def check(names: Sequence[TrackerName], run: RunDirectory) -> None:
    """Reject trackers that cannot work here, without importing their packages.

    Raises:
        ConfigError: a package is missing, or the run directory cannot hold a tracker's files.

    """
    for name in names:
        if missing := [package for package in _PACKAGES[name] if not _is_installed(package)]:
            raise ConfigError(
                f"tracking: {name} needs {', '.join(missing)}, not installed: "
                f"pip install 'raypipe-runner[tracking]', or remove {name} from tracking"
            )
        server = {
            "tensorboard": (False, ""),
            "mlflow": (mlflow_server() is not None, ", or a server (set MLFLOW_TRACKING_URI)"),
            "wandb": (not wandb_is_offline(), ", or its server (set WANDB_MODE=online)"),
        }
        used, hint = server[name]
        if not (used or run.is_local):
            raise ConfigError(
                f"tracking: {name} needs a local run directory, not {run.shown}{hint}"
            )


def flat(values: Mapping[str, Any]) -> dict[str, Setting]:
    """Flatten sections to dotted keys: lists as JSON, secrets as ``***``, nulls left out.

    ``{"a": {"b": [1, 2], "api_key": "x"}}`` -> ``{"a.b": "[1, 2]", "a.api_key": "***"}``
    """
    result: dict[str, Setting] = {}
    for key, value in values.items():
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if value is None:
            continue
        if is_secret(key):
            result[key] = HIDDEN
        elif isinstance(value, Mapping):
            result |= {f"{key}.{inner}": item for inner, item in flat(value).items()}
        elif isinstance(value, bool | int | float):
            result[key] = value
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            result[key] = encodable(without_credentials(text))
    return result


def _load(name: TrackerName) -> Callable[[Target, str], TrialTracker]:
    if name == "tensorboard":
        from raypipe.integrations.tensorboard import TensorBoardTrial

        return TensorBoardTrial
    if name == "mlflow":
        from raypipe.integrations.mlflow import MlflowTrial

        return MlflowTrial
    from raypipe.integrations.wandb import WandbTrial

    return WandbTrial


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # a folder ./wandb of earlier runs looks like a package without a file
    return spec is not None and spec.origin is not None
