"""Trainings of a grid as Ray Tune function trials, as in Ray's documentation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ray import tune
from torch.utils.data import DataLoader

from benchmarks.loops.cases import MeanLoss
from benchmarks.trials.by_ray import without_settings_of_raypipe
from benchmarks.trials.experiment import make_task
from benchmarks.trials.plan import Grid
from raypipe.config.matrix import SEED_STRIDE


def run(grid: Grid, clock: Path, folder: Path, *, reuse_actors: bool = False) -> list[float]:
    """Run the trials and return the last loss of each.

    Raises:
        RuntimeError: a trial failed.

    """
    with without_settings_of_raypipe():
        tuner = tune.Tuner(
            tune.with_resources(_train, {"CPU": 1}),
            param_space={
                "grid": asdict(grid),
                "clock": str(clock),
                "point": tune.grid_search(grid.points),
            },
            tune_config=tune.TuneConfig(reuse_actors=reuse_actors),
            run_config=tune.RunConfig(name="matrix", storage_path=str(folder), verbose=0),
        )
        results = tuner.fit()
    if results.num_errors:
        raise RuntimeError(f"{results.num_errors} trials failed: {results.errors[0]}")
    losses: dict[tuple[float, float, int], float] = {}
    for number in range(len(results)):
        told = results[number].metrics or {}
        losses[tuple(told["config"]["point"])] = told["loss"]
    return [losses[point] for point in grid.points]


def _train(config: dict[str, Any]) -> None:
    """Run the hand-written training loop of a trial."""
    grid = Grid(**config["grid"])
    learning_rate, clip_norm, number = config["point"]
    torch.set_num_threads(1)
    torch.manual_seed(SEED_STRIDE * number)
    task = make_task(grid.steps, grid.micro_batch, config["clock"])
    model = MeanLoss(task.build_model(), task)
    loader = DataLoader(task.build_dataset(), grid.micro_batch)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.0, fused=True)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    tune.report({"loss": loss.item()})
