"""TensorBoard tracker: event files in ``tracking/tensorboard/<trial>`` of the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from raypipe.integrations.target import Setting, Target


class TensorBoardTrial:
    """The event files of a trial; its settings become hyperparameters when it ends."""

    def __init__(self, target: Target, trial_id: str) -> None:
        name = target.run.log(trial_id).rpartition("/")[2].removesuffix(".log")
        folder = f"{target.run.tracking}/tensorboard/{name}"
        is_new = not Path(folder).exists()
        self._writer = SummaryWriter(folder)
        self._events: Any = self._writer.file_writer
        self._last: int | None = None
        if is_new:
            lines = (f"    {name}: {value}" for name, value in target.configuration.items())
            self._writer.add_text("configuration", "\n".join(lines), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step; a repeated step replaces itself and all later ones."""
        if self._last is None or step <= self._last:
            # the event of SummaryWriter(purge_step=...), without another file
            start = SessionLog(status=SessionLog.START)
            self._events.add_event(Event(session_log=start), step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self._last = step

    def end(
        self,
        status: str,
        settings: Mapping[str, Setting],
        metrics: Mapping[str, float],
        steps: int,
    ) -> None:
        """Write the row of the HParams view."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, steps)
        summaries = hparams({"status": status, **settings}, dict(metrics))
        if status != "succeeded":  # torch marks every run as a success
            plugin = summaries[-1].value[0].metadata.plugin_data
            end = HParamsPluginData.FromString(plugin.content)
            end.session_end_info.status = Status.STATUS_FAILURE
            plugin.content = end.SerializeToString()
        for summary in summaries:
            self._events.add_summary(summary)
        self._writer.close()
