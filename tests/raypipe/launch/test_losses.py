"""Memory and nodes that are lost: in a cluster of its own each, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from ray.cluster_utils import Cluster

from raypipe.errors import UnitError
from raypipe.graph.launcher import PoolOptions
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.inline import InlineLauncher
from raypipe.training.job import TrainingJob
from raypipe.training.recovery import train_to_the_end
from tests.raypipe.examples.example_tasks import Regression, outcome
from tests.raypipe.launch.test_train import assert_same, ignore, job

# Ray and the training processes take less than the first; with the second they take more
ROOM_BYTES = 1.8e9
HUNGER_BYTES = 3.0e9


def eat() -> None:
    """Take memory until killed, or until it would be unkind."""
    taken = []
    for _ in range(20):
        taken.append(b"x" * int(HUNGER_BYTES / 20))
        time.sleep(0.1)
    time.sleep(20)


class Hungry(Regression):
    """Rank 1 eats at its third step."""

    def loss(self, model, batch, context):
        if context.step == 2 and dist.get_rank() == 1:
            eat()
        return super().loss(model, batch, context)


def run_out_of_memory(folder: Path, how: str) -> list[str | None]:
    """Return the kinds of failure where Ray's memory monitor has a low threshold."""
    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + ROOM_BYTES) / memory.total
    os.environ.update(
        {"RAY_memory_usage_threshold": f"{limit:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    )
    launcher = RayLauncher()
    kinds: list[str | None] = []
    try:
        if how == "train":
            launcher.train(replace(job(folder, 4, 2, 2), task=Hungry()), ignore)
        else:
            with launcher.pool(PoolOptions(1, keep_processes=how == "kept")) as pool:
                pool.submit("hungry", eat)
                kinds += [result.kind for result in pool.finished()]
    except UnitError as error:
        kinds.append(error.kind)
    launcher.close()
    return kinds


NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


def slow_job(folder: Path, workers: int, seconds: float) -> TrainingJob:
    asked = job(folder, 4, 2, 2, steps=400)  # one worker has the plan of two
    settings = asked.settings.changed("scaling", workers=workers)
    return replace(asked, task=Regression(pause_s=seconds), settings=settings)


def lose_a_node(folder: Path) -> tuple[list[str], list[str]]:
    """Train on two nodes; one goes at step 20, and another comes once the run waits for it."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    launcher = RayLauncher(cluster.address)
    said: list[str] = []
    kinds: list[str] = []

    def report(told: dict[str, Any] | str) -> None:
        if isinstance(told, str):
            said.append(told)
            if len(said) == 1:
                cluster.add_node(**NODE)
        elif told["step"] >= 20 and second in cluster.list_all_nodes():
            cluster.remove_node(second, allow_graceful=False)

    def on_failure(job: TrainingJob, error: UnitError, what: str) -> None:
        kinds.append(error.kind)

    train_to_the_end(slow_job(folder, 2, 0.06), lambda job: launcher.train(job, report), on_failure)
    launcher.close()
    cluster.shutdown()
    return kinds, said


def in_its_own_process(function: Callable[..., Any], *arguments: object) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train", "task", "kept"])
def test_a_worker_killed_for_its_memory_is_told_apart(tmp_path, how):
    assert in_its_own_process(run_out_of_memory, tmp_path, how) == ["host_out_of_memory"]


@pytest.mark.slow
def test_a_group_waits_for_its_lost_node_to_come_back(tmp_path):
    kinds, (waits, goes_on) = in_its_own_process(lose_a_node, tmp_path)
    assert kinds == ["node_lost"]
    assert waits == "nodes were lost; waiting up to 10 minutes for others"
    assert goes_on.startswith("continues from step")
    alone = slow_job(tmp_path / "alone", 1, 0.0)
    InlineLauncher().train(alone, ignore)
    trained = slow_job(tmp_path, 2, 0.0)
    assert_same(outcome(trained), outcome(alone))
