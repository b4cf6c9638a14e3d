"""Trainings of one GPU each on a node of eight GPUs that exist only for Ray; on CPU tensors.

python -m tests.raypipe.launch.gpu_node FOLDER NUMBER
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchConfig

from raypipe.config.settings import Settings
from raypipe.graph.configuration import compose
from raypipe.graph.experiment import Experiment
from raypipe.graph.progress import Display
from raypipe.graph.runner import run_stages
from raypipe.graph.session import Session
from raypipe.graph.stages import train_stage
from raypipe.hardware import Gpu, Hardware
from raypipe.integrations.tracking import Trackers
from raypipe.launch import group
from raypipe.launch.cluster import RayLauncher
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.training.job import TrainingJob
from raypipe.training.parallel import Worker
from raypipe.training.settings import TrainStageSettings
from tests.raypipe.launch.test_train import Regression

ray.train.torch.get_device = lambda: torch.device("cpu")
TrainingJob.lone_worker = lambda self: Worker(0, torch.device("cpu"))
GPUS = 8
WAIT_S = 600


class Together(Regression):
    """Notes its start and end; in the first step, waits until so many have started."""

    def __init__(self, folder: Path, name: str, number: int) -> None:
        self.folder, self.name, self.number = folder, name, number

    def loss(self, model: Any, batch: Any, context: Any) -> Any:
        (self.folder / self.name).touch()
        deadline = time.monotonic() + WAIT_S
        while len(list(self.folder.iterdir())) < self.number:
            if time.monotonic() > deadline:
                raise TimeoutError("the others did not start")
            time.sleep(0.1)
        return super().loss(model, batch, context)


def main(folder: Path, number: int) -> str | None:
    """Run the trainings; the first GPUS of them end only if they run at the same time."""
    group.TorchConfig = lambda backend: TorchConfig("gloo")
    cluster = Cluster(True, head_node_args={"num_cpus": 2 * GPUS, "num_gpus": GPUS})
    launcher = RayLauncher(cluster.address)
    signs, run_dir = folder / "signs", RunDirectory.at(folder / "run")
    signs.mkdir()
    settings = TrainStageSettings.model_validate(
        {"training": {"steps": 3, "micro_batch": 4, "accumulation": 1, "effective_batch": 4}}
    )

    def stage(name: str) -> Any:
        return train_stage(
            name, settings, lambda _, run_dir: Together(signs, name, min(number, GPUS))
        )

    experiment = Experiment("gpus", 1, Settings, lambda _: [])
    stages = compose(experiment, Settings(), [stage(f"t{place}") for place in range(number)])
    gpus = tuple(Gpu(place, f"GPU-{place}", "card", 2**34, "9.0") for place in range(GPUS))
    node = Hardware("here", 2 * GPUS, 2**34, gpus)
    none = Trackers((), run_dir, "r", "gpus", {})
    session = Session(run_dir, "r", Ledger(run_dir), launcher, Display(), [node], none)
    try:
        return run_stages(stages, session)
    finally:
        launcher.close()
        cluster.shutdown()
