"""Trials as in Ray's documentation: a Tune function that runs a TorchTrainer.

The guide is "Hyperparameter Tuning with Ray Tune" of Ray Train V2. Tune's function reserves no
CPU, because two workers would otherwise wait forever on two CPUs, and ``max_concurrent_trials`` is
one. All other settings are Ray's defaults. The loop reports once, at its end, which is the minimum
that Tune needs: every report waits for the controller's next poll.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray import tune
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from ray.tune.integration.ray_train import TuneReportCallback
from torch.utils.data import DataLoader

from benchmarks.loops.cases import MeanLoss
from benchmarks.trials.experiment import make_task
from benchmarks.trials.plan import Plan
from raypipe.launch import QUIET

# Ray's defaults of variables that raypipe sets for all processes of its cluster
_DEFAULTS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "1",
}


def run(plan: Plan, clock: Path, folder: Path) -> list[float]:
    """Run the trials and return the last loss of each seed.

    Raises:
        RuntimeError: a trial failed.

    """
    with without_settings_of_raypipe():
        tuner = tune.Tuner(
            tune.with_resources(_drive, {"CPU": 0, "memory": 1}),
            param_space={
                "plan": asdict(plan),
                "clock": str(clock),
                "folder": str(folder),
                "seed": tune.grid_search(plan.seeds),
            },
            tune_config=tune.TuneConfig(max_concurrent_trials=1),
            run_config=tune.RunConfig(name="sweep", storage_path=str(folder), verbose=0),
        )
        results = tuner.fit()
    if results.num_errors:
        raise RuntimeError(f"{results.num_errors} trials failed: {results.errors[0]}")
    losses: dict[int, float] = {}
    for number in range(len(results)):
        told = results[number].metrics or {}
        losses[told["config"]["seed"]] = told["loss"]
    return [losses[seed] for seed in plan.seeds]


def _drive(config: dict[str, Any]) -> None:
    """Run a trial as a separate Ray Train run."""
    os.environ.update(_DEFAULTS)
    workers = config["plan"]["workers"]
    callbacks: list[Any] = [TuneReportCallback()]
    trainer = TorchTrainer(
        _train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, resources_per_worker={"CPU": 1}
        ),
        run_config=ray.train.RunConfig(
            name=f"train-{tune.get_context().get_trial_id()}",
            storage_path=config["folder"],
            callbacks=callbacks,
        ),
    )
    trainer.fit()


def _train(config: dict[str, Any]) -> None:
    """Run the hand-written training loop of a worker."""
    plan = Plan(**config["plan"])
    torch.manual_seed(config["seed"])
    task = make_task(plan.steps, plan.effective_batch, config["clock"])
    model = prepare_model(MeanLoss(task.build_model(), task))
    loader = prepare_data_loader(DataLoader(task.build_dataset(), plan.micro_batch))
    optimizer = torch.optim.AdamW(
        model.parameters(), plan.learning_rate, weight_decay=0.0, fused=True
    )
    for batch in loader:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    ray.train.report({"loss": mean.item()})


@contextmanager
def without_settings_of_raypipe() -> Iterator[None]:
    """Leave Ray's defaults in place of the environment variables that raypipe sets."""
    display = "RAY_AIR_NEW_OUTPUT"
    kept = {name: os.environ.pop(name) for name in QUIET if name != display}
    try:
        yield
    finally:
        os.environ.update(kept)
