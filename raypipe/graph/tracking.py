"""Trackers: copies of training curves and settings for TensorBoard, MLflow and Weights & Biases.

The tables of the run directory are the record. A tracker has one run per trial, or per call of a
function, which begins with the steps of the table ``steps``. When a run directory is continued, it
replaces that of the earlier command.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import posixpath
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from raypipe.config.shipped import file_of_module
from raypipe.errors import ConfigError
from raypipe.redaction import HIDDEN, encodable, is_secret, without_credentials
from raypipe.stats import finite_or_none

if TYPE_CHECKING:  # loading pyarrow takes as long as all of ``raypipe --help``
    from raypipe.store.run_directory import RunDirectory

TrackerName = Literal["tensorboard", "mlflow", "wandb"]
Setting = str | bool | int | float
#: settings of a trial by dotted key, and numbers by the names of its metrics
Parameters = Mapping[str, Setting]
Metrics = Mapping[str, float]

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
_LONGEST_VALUE = 6000
_MLFLOW_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "out_of_memory": "FAILED"}


@dataclass(frozen=True)
class Target:
    """The raypipe run that trackers copy; ``configuration`` is flat, without secrets."""

    run: RunDirectory
    run_id: str
    experiment: str
    configuration: Parameters


class _LoggedTrial:
    """A trial in a tracker."""

    #: the last step that is stored
    last = -1


class TensorBoardTrial(_LoggedTrial):
    """Event files in ``tracking/tensorboard/<trial>``, which replace those of an earlier command.

    The settings become hyperparameters when the trial ends.
    """

    def __init__(self, target: Target, trial_id: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        name = target.run.log(trial_id).rpartition("/")[2].removesuffix(".log")
        folder = f"{target.run.tracking}/tensorboard/{name}"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(folder)
        lines = (f"    {name}: {value}" for name, value in target.configuration.items())
        self._writer.add_text("configuration", "\n".join(lines), 0)

    def write(self, step: int, metrics: Metrics) -> None:
        """Store metrics of a step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, status: str, settings: Parameters, metrics: Metrics) -> None:
        """Write the row of the HParams view."""
        chosen = {"status": status, **settings}
        step = max(self.last, 0)
        self._writer.add_hparams(chosen, dict(metrics), run_name=".", global_step=step)
        self._writer.close()


class MlflowTrial(_LoggedTrial):
    """The MLflow run of a trial, with its tags: in ``tracking/mlflow.db``, or on a server."""

    def __init__(self, target: Target, trial_id: str) -> None:
        from mlflow import MlflowClient

        uri, artifacts = _mlflow_server(), None
        if uri is None:
            folder = Path(target.run.tracking)
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder}/mlflow.db", f"{folder}/mlflow-artifacts"
        self._client = client = MlflowClient(tracking_uri=uri)
        self._configuration = target.configuration
        self._names: dict[str, str] = {}
        found = client.get_experiment_by_name(target.experiment)
        experiment = (
            found.experiment_id if found else client.create_experiment(target.experiment, artifacts)
        )
        tags = {"raypipe.run_id": target.run_id, "raypipe.trial_id": trial_id}
        query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        for earlier in client.search_runs([experiment], query):
            client.delete_run(earlier.info.run_id)
        self._id = client.create_run(experiment, tags=tags, run_name=trial_id).info.run_id

    def write(self, step: int, metrics: Metrics) -> None:
        """Store metrics of a step."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        stored = [Metric(self._name(name), v, now_ms, step) for name, v in metrics.items()]
        self._client.log_batch(self._id, metrics=stored)

    def end(self, status: str, settings: Parameters, metrics: Metrics) -> None:
        """Store the configuration and the trial's settings as parameters."""
        from mlflow.entities import Param

        values = {**self._configuration, **settings}
        new = [Param(self._name(k), str(v)[:_LONGEST_VALUE]) for k, v in values.items()]
        self._client.log_batch(self._id, params=new)
        self._client.set_tag(self._id, "raypipe.status", status)
        self.write(max(self.last, 0), metrics)
        self._client.set_terminated(self._id, _MLFLOW_STATUS.get(status, "KILLED"))

    def _name(self, name: str) -> str:
        """Return a name of characters that MLflow accepts, unlike those of other names."""
        if name not in self._names:
            is_path = posixpath.normpath(f"/{name}") == f"/{name}"
            own = re.sub(r"[^\w./ -]" if is_path else r"[^\w -]", "_", name)
            while own in self._names.values():
                own += "_"
            self._names[name] = own
        return self._names[name]


class WandbTrial(_LoggedTrial):
    """The W&B run of a trial, in the group of its raypipe run; the id derives from both.

    The server continues a run. Offline, the package writes another folder for ``wandb sync``, does
    not know the steps in earlier folders, and may have lost the last ones with a killed process. So
    the folder replaces earlier ones.
    """

    def __init__(self, target: Target, trial_id: str) -> None:
        import wandb

        name = hashlib.sha256(f"{target.run_id}/{trial_id}".encode()).hexdigest()[:16]
        offline = _wandb_is_offline()
        folder = Path(target.run.tracking) if target.run.is_local else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for old in list(folder.glob(f"wandb/offline-run-*-{name}*")) if offline else ():
                shutil.rmtree(old)
        self._run = wandb.init(
            project=target.experiment,
            group=target.run_id,
            name=trial_id,
            id=name,
            resume=None if offline else "allow",
            reinit="create_new",  # several trials are open at the same time
            config=dict(target.configuration),
            dir=folder,
            settings=wandb.Settings(
                mode="offline" if offline else os.environ["WANDB_MODE"],
                silent=True,
                console="off",
                symlink=False,  # latest-run is ambiguous with concurrent trials
                save_code=False,
                disable_git=True,
                x_disable_meta=True,  # the command line may contain secrets
                x_disable_stats=True,  # it would sample the driver; raypipe samples the workers
                x_save_requirements=False,
            ),
        )

    def write(self, step: int, metrics: Metrics) -> None:
        """Store metrics of a step, unless W&B has it: it would ignore each with a warning."""
        if step >= self._run.step:
            self._run.log(dict(metrics), step=step, commit=True)

    def end(self, status: str, settings: Parameters, metrics: Metrics) -> None:
        """Write the settings to the run's configuration, and the outcome to its summary."""
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.summary.update({"status": status, **metrics})
        self._run.finish(exit_code=int(status != "succeeded"))


TrialTracker = TensorBoardTrial | MlflowTrial | WandbTrial
_KINDS: Mapping[TrackerName, Callable[[Target, str], TrialTracker]] = {
    "tensorboard": TensorBoardTrial,
    "mlflow": MlflowTrial,
    "wandb": WandbTrial,
}


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
        self._lock, self._names = Lock(), list(names)
        self._trials: dict[tuple[TrackerName, str], TrialTracker] = {}

    def log(self, trial_id: str, row: Mapping[str, Any]) -> None:
        """Log the finite numbers of a row of the table ``steps``."""
        self._each(trial_id, lambda trial: _log(trial, row))

    def end(self, trial_id: str, row: Mapping[str, Any]) -> None:
        """Log a row of the table ``trials``: settings, status, and measurements as ``final/``."""
        from raypipe.training.tables import SETTINGS

        names = ["stage", "trained_stage", "kind", "device", *(each.name for each in SETTINGS)]
        chosen = {name: row[name] for name in names if name in row}
        settings = flat({**chosen, **(row.get("point") or {})})
        measured = {name: value for name, value in row.items() if name not in names}
        metrics = {f"final/{name}": value for name, value in finite_numbers(measured).items()}
        self._end(trial_id, str(row["status"]), settings, metrics)

    def call(
        self, name: str, status: str, arguments: Mapping[str, Any], returned: Mapping[str, Any]
    ) -> None:
        """Log a call of a function: its arguments, and the finite numbers of what it returned."""
        if self._names:  # most commands have no tracker, and there may be a million calls
            self._end(name, status, flat(arguments), finite_numbers(returned))

    def _end(self, trial_id: str, *outcome: Any) -> None:
        self._each(trial_id, lambda trial: trial.end(*outcome))
        self._trials = {key: trial for key, trial in self._trials.items() if key[1] != trial_id}

    def __exit__(self, *error: object) -> None:
        """Close all runs; trials that did not end are recorded as interrupted."""
        for trial_id in {trial_id for _, trial_id in self._trials}:
            self.end(trial_id, {"status": "interrupted"})

    def _each(self, trial_id: str, act: Callable[[TrialTracker], None]) -> None:
        """Call a function with the trial's run of each tracker, which is opened first.

        A tracker that raises is disabled for this command. Its package may raise anything (disk
        full, server down, a bug), and hours of training must not end because of a copy of the run
        directory. This is the one place that catches every exception.
        """
        from raypipe.store.tables import read_rows

        target = self._target
        with self._lock:
            for name in list(self._names):
                try:
                    if (name, trial_id) not in self._trials:
                        self._trials[name, trial_id] = trial = _KINDS[name](target, trial_id)
                        for row in read_rows(target.run, "steps", trial_id):
                            _log(trial, row)
                    act(self._trials[name, trial_id])
                except Exception as error:
                    self._names.remove(name)
                    self._trials = {key: t for key, t in self._trials.items() if key[0] != name}
                    log.warning(
                        "tracking: %s failed and is disabled for this command; the tables of the "
                        "run are complete: %s: %s",
                        *(name, type(error).__name__, without_credentials(str(error))),
                    )


def _log(trial: TrialTracker, row: Mapping[str, Any]) -> None:
    """Log a step; one that is repeated after a restart stays as it is."""
    metrics = finite_numbers(row)
    step = int(metrics.pop("step"))
    if step > trial.last:
        trial.write(step, metrics)
        trial.last = step


def check(names: Sequence[TrackerName], run: RunDirectory) -> None:
    """Reject trackers that cannot work here, without importing their packages.

    Raises:
        ConfigError: a package is missing, or the run directory cannot hold a tracker's files.

    """
    servers = {
        "tensorboard": (False, ""),
        "mlflow": (_mlflow_server() is not None, ", or a server (set MLFLOW_TRACKING_URI)"),
        "wandb": (not _wandb_is_offline(), ", or its server (set WANDB_MODE=online)"),
    }
    for name in names:
        # a folder ./wandb of earlier runs is not a package
        if missing := [package for package in _PACKAGES[name] if not file_of_module(package)]:
            raise ConfigError(
                f"tracking: {name} needs {', '.join(missing)}, not installed: "
                f"pip install 'raypipe-runner[tracking]', or remove {name} from tracking"
            )
        has_server, hint = servers[name]
        if not (has_server or run.is_local):
            raise ConfigError(
                f"tracking: {name} needs a local run directory, not {run.shown}{hint}"
            )


def finite_numbers(row: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers of a row, which are its metrics."""
    return {
        name: number for name, value in row.items() if (number := finite_or_none(value)) is not None
    }


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


def _mlflow_server() -> str | None:
    """Return the server that the user's environment names."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def _wandb_is_offline() -> bool:
    """Whether W&B writes local files, as it does unless the user's environment says otherwise."""
    return (os.environ.get("WANDB_MODE") or "offline") in ("offline", "dryrun")
