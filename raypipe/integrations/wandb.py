"""Weights & Biases tracker: files for ``wandb sync`` in ``tracking/wandb``, or its server."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import wandb

from raypipe.integrations.target import Setting, Target, finite_numbers, wandb_is_offline
from raypipe.store import tables as results


class WandbTrial:
    """The W&B run of a trial, in the group of its raypipe run; the id derives from both.

    The server continues a run. Offline, the package writes another folder, does not know the steps
    in earlier folders, and may have lost the last ones with a killed process. The folder of a
    continued trial is therefore rewritten from the table ``steps``.
    """

    def __init__(self, target: Target, trial_id: str) -> None:
        name = hashlib.sha256(f"{target.run_id}/{trial_id}".encode()).hexdigest()[:16]
        offline = wandb_is_offline()
        folder = Path(target.run.tracking) if target.run.is_local else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            earlier = list(folder.glob(f"wandb/offline-run-*-{name}*")) if offline else []
            for old in earlier:
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
        self._last = self._run.step - 1
        if offline and target.run.exists(target.run.partition("steps", trial_id)):
            for row in results.read_partition(target.run, "steps", trial_id).to_dict("records"):
                metrics = finite_numbers(row)
                self.log(int(metrics.pop("step")), metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step; a step that was stored before is not changed."""
        if step > self._last:
            self._run.log(dict(metrics), step=step, commit=True)
            self._last = step

    def end(
        self,
        status: str,
        settings: Mapping[str, Setting],
        metrics: Mapping[str, float],
        steps: int,
    ) -> None:
        """Write the settings to the run's configuration, and the outcome to its summary."""
        del steps
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.summary.update({"status": status, **metrics})
        self._run.finish(exit_code=int(status != "succeeded"))
