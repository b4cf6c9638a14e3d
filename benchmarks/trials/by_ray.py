"""The trainings by Ray Tune, as in its documentation.

A trial of a sweep is a Tune function that runs a TorchTrainer, as in the guide "Hyperparameter
Tuning with Ray Tune" of Ray Train V2; one of a matrix is a function trial. Tune's function of a
sweep reserves no CPU, because two workers would otherwise wait forever on two CPUs, and
``max_concurrent_trials`` is one. All other settings are Ray's defaults. The loop reports once, at
its end, which is the minimum that Tune needs: every report waits for the controller's next poll.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from benchmarks.trials.experiment import Study, make_task
from raypipe.launch import QUIET

# Ray's defaults of variables that raypipe sets for all processes of its cluster
_DEFAULTS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "1",
}


def sweep(study: Study, clock: Path, folder: Path) -> list[float]:
    """Run the trials one after the other, each with a TorchTrainer; return the last losses."""
    trainable = tune.with_resources(_in_trainer, {"CPU": 0, "memory": 1})
    return _tuned(trainable, study, clock, folder, tune.TuneConfig(max_concurrent_trials=1))


def matrix(study: Study, clock: Path, folder: Path) -> list[float]:
    """Run the trainings as function trials of a CPU each; return the last losses."""
    return _tuned(_one_cpu(), study, clock, folder, tune.TuneConfig())


def matrix_in_reused_actors(study: Study, clock: Path, folder: Path) -> list[float]:
    """Run the same trials in processes that go on with the next one."""
    return _tuned(_one_cpu(), study, clock, folder, tune.TuneConfig(reuse_actors=True))


def by_hand(study: Study, clock: Path, folder: Path) -> list[float]:
    """Run the same loop in this process, without Ray; return the last losses."""
    del folder
    torch.set_num_threads(1)
    about = {"study": study, "clock": str(clock)}
    return [_train({**about, "point": point}, _as_it_is, _as_it_is) for point in study.points]


def _one_cpu() -> Any:
    return tune.with_resources(_in_trial, {"CPU": 1})


def _tuned(
    trainable: Any, study: Study, clock: Path, folder: Path, config: tune.TuneConfig
) -> list[float]:
    """Run a trial for each point. Raises RuntimeError if one failed."""
    space = {"study": study, "clock": str(clock), "folder": str(folder)}
    with _without_settings_of_raypipe():
        tuner = tune.Tuner(
            trainable,
            param_space={**space, "point": tune.grid_search(list(study.points))},
            tune_config=config,
            run_config=tune.RunConfig(name=study.name, storage_path=str(folder), verbose=0),
        )
        results = tuner.fit()
    if results.num_errors:
        raise RuntimeError(f"{results.num_errors} trials failed: {results.errors[0]}")
    losses = {}
    for number in range(len(results)):
        told = results[number].metrics or {}
        losses[tuple(told["config"]["point"])] = float(told["loss"])
    return [losses[point] for point in study.points]


def _in_trial(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    tune.report({"loss": _train(config, _as_it_is, _as_it_is)})


def _as_it_is(part: Any) -> Any:
    return part


def _in_trainer(config: dict[str, Any]) -> None:
    """Run a trial as a separate Ray Train run."""
    os.environ.update(_DEFAULTS)
    callbacks: list[Any] = [TuneReportCallback()]
    trainer = TorchTrainer(
        _in_worker,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=config["study"].workers, resources_per_worker={"CPU": 1}
        ),
        run_config=ray.train.RunConfig(
            name=f"train-{tune.get_context().get_trial_id()}",
            storage_path=config["folder"],
            callbacks=callbacks,
        ),
    )
    trainer.fit()


def _in_worker(config: dict[str, Any]) -> None:
    ray.train.report({"loss": _train(config, prepare_model, prepare_data_loader)})


def _train(
    config: dict[str, Any],
    prepared_model: Callable[[Any], Any],
    prepared_loader: Callable[[Any], Any],
) -> float:
    """Run a hand-written training loop; return the mean of the last loss over the workers."""
    study: Study = config["study"]
    learning_rate, clip_norm, seed = config["point"]
    torch.manual_seed(seed)
    task = make_task(study.steps, study.effective_batch, config["clock"], study.model)
    model = prepared_model(MeanLoss(task.build_model(), task))
    loader = prepared_loader(DataLoader(task.build_dataset(), study.micro_batch))
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.0, fused=True)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return float(mean)


@contextmanager
def _without_settings_of_raypipe() -> Iterator[None]:
    """Leave Ray's defaults in place of the environment variables that raypipe sets."""
    display = "RAY_AIR_NEW_OUTPUT"
    kept = {name: os.environ.pop(name) for name in QUIET if name != display and name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
