"""Weights & Biases: files for ``wandb sync`` at ``tracking/wandb``, or its server."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import wandb

from raypipe.storage import tables as results
from raypipe.tracking import Setting, Target, finite_numbers, wandb_is_offline


class WandbTrial:
    """The W&B run of a trial, in the group of its raypipe run, under an id made from both.

    Its server continues a run. Offline the package writes a further folder, knows nothing of the
    steps in the earlier ones, and may have lost the last of them with a killed process; so the
    folder of a trial that goes on is written anew, from the table ``steps`` on.
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
            reinit="create_new",  # several trials are open at a time
            config=dict(target.configuration),
            dir=folder,
            settings=wandb.Settings(
                mode="offline" if offline else os.environ["WANDB_MODE"],
                silent=True,
                console="off",
                symlink=False,  # latest-run: of many trials that go on at a time
                save_code=False,
                disable_git=True,
                x_disable_meta=True,  # the command line may hold secrets
                x_disable_stats=True,  # of the driver: raypipe samples the workers
                x_save_requirements=False,
            ),
        )
        self._last = self._run.step - 1
        if offline and target.run.exists(target.run.partition("steps", trial_id)):
            for row in results.read_partition(target.run, "steps", trial_id).to_dict("records"):
                metrics = finite_numbers(row)
                self.log(int(metrics.pop("step")), metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step; one that was stored before stays as it is."""
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
        """The settings go to the run's configuration, the outcome to its summary."""
        del steps
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.summary.update({**metrics, "status": status})
        self._run.finish(exit_code=int(status != "succeeded"))
