"""MLflow tracker: the SQLite file ``tracking/mlflow.db`` of the run directory, or a server."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from raypipe.integrations.target import Setting, Target, mlflow_server

_MOST_PARAMETERS = 100  # per request
_LONGEST_VALUE = 6000
_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "out_of_memory": "FAILED"}


class MlflowTrial:
    """The MLflow run of a trial, found by its tags.

    MLflow's parameters cannot change. If a later attempt has another value (half the micro-batch
    after out of memory), the tag ``raypipe.<name>`` holds it.
    """

    def __init__(self, target: Target, trial_id: str) -> None:
        uri, artifacts = mlflow_server(), None
        if uri is None:
            folder = Path(target.run.tracking)
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder}/mlflow.db", f"{folder}/mlflow-artifacts"
        self._client = MlflowClient(tracking_uri=uri)
        self._configuration = target.configuration
        self._names: dict[str, str] = {}
        found = self._client.get_experiment_by_name(target.experiment)
        if found is not None:
            experiment = found.experiment_id
        else:
            experiment = self._client.create_experiment(target.experiment, artifacts)
        tags = {"raypipe.run_id": target.run_id, "raypipe.trial_id": trial_id}
        query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        runs = self._client.search_runs([experiment], query, max_results=1)
        if runs:
            self._last = self._last_step(runs[0])
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, tags=tags, run_name=trial_id)
            self._last, self._id = -1, run.info.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store a step before returning; a step that was stored before is not changed."""
        if step > self._last:
            self._client.log_batch(self._id, metrics=self._metrics(metrics, step))
            self._last = step

    def end(
        self,
        status: str,
        settings: Mapping[str, Setting],
        metrics: Mapping[str, float],
        steps: int,
    ) -> None:
        """Store the configuration and the trial's settings as parameters."""
        stored = self._client.get_run(self._id).data
        values = {
            self._name(name): str(value)[:_LONGEST_VALUE]
            for name, value in {**self._configuration, **settings}.items()
        }
        new = [Param(name, value) for name, value in values.items() if name not in stored.params]
        for start in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=new[start : start + _MOST_PARAMETERS])
        tags = {"raypipe.status": status}
        for name, value in values.items():
            tag = f"raypipe.{name}"
            if stored.tags.get(tag, stored.params.get(name, value)) != value:
                tags[tag] = value
        for tag, value in tags.items():
            self._client.set_tag(self._id, tag, value)
        final = self._metrics(metrics, steps)
        self._client.log_batch(
            self._id, metrics=[m for m in final if stored.metrics.get(m.key) != m.value]
        )
        self._client.set_terminated(self._id, _STATUS.get(status, "KILLED"))

    def _last_step(self, run: Run) -> int:
        names = [name for name in run.data.metrics if not name.startswith("final/")]
        stored = [self._client.get_metric_history(run.info.run_id, name) for name in names]
        return max((metric.step for history in stored for metric in history), default=-1)

    def _metrics(self, metrics: Mapping[str, float], step: int) -> list[Metric]:
        now_ms = int(time.time() * 1000)
        return [Metric(self._name(name), value, now_ms, step) for name, value in metrics.items()]

    def _name(self, name: str) -> str:
        """Return a name of characters that MLflow accepts, unlike those of other names."""
        if name not in self._names:
            is_path = posixpath.normpath(f"/{name}") == f"/{name}"
            own = re.sub(r"[^\w./ -]" if is_path else r"[^\w -]", "_", name)
            while own in self._names.values():
                own += "_"
            self._names[name] = own
        return self._names[name]
