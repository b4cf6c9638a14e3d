"""Memory and nodes that are lost: in a cluster of its own each, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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

PROJECT = Path(__file__).resolve().parents[3]
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


def run_out_of_memory(folder: Path, how: str) -> list[str]:
    """Return the kinds of failure where Ray's memory monitor has a low threshold."""
    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + ROOM_BYTES) / memory.total
    os.environ.update(
        {"RAY_memory_usage_threshold": f"{limit:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    )
    launcher = RayLauncher()
    if how != "train":
        with launcher.pool(PoolOptions(1, keep_processes=how == "kept")) as pool:
            pool.submit("hungry", eat)
            kinds = [result.kind for result in pool.finished()]
    else:
        try:
            launcher.train(replace(job(folder, 4, 2, 2), task=Hungry()), ignore)
            kinds = []
        except UnitError as error:
            kinds = [error.kind]
    launcher.close()
    return kinds


STEPS = 400
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


class Slow(Regression):
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def loss(self, model, batch, context):
        time.sleep(self.seconds)
        return super().loss(model, batch, context)


def slow_job(folder: Path, workers: int, seconds: float) -> TrainingJob:
    asked = job(folder, 4, 2, 2, steps=STEPS)
    settings = asked.settings.changed("scaling", workers=workers)
    return replace(asked, task=Slow(seconds), settings=settings)


def lose_a_node(folder: Path) -> dict[str, list[str]]:
    """Train on two nodes; one goes at step 20, and another comes once the run waits for it."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    launcher = RayLauncher(cluster.address)
    said: list[str] = []
    kinds: list[str] = []
    lost = False

    def report(told: dict[str, Any] | str) -> None:
        nonlocal lost
        if isinstance(told, str):
            said.append(told)
            if len(said) == 1:
                cluster.add_node(**NODE)
        elif told["step"] >= 20 and not lost:
            lost = True
            cluster.remove_node(second, allow_graceful=False)

    def on_failure(job: TrainingJob, error: UnitError, what: str) -> None:
        kinds.append(error.kind)

    train_to_the_end(slow_job(folder, 2, 0.06), lambda job: launcher.train(job, report), on_failure)
    launcher.close()
    cluster.shutdown()
    return {"said": said, "kinds": kinds}


def in_its_own_process(folder: Path, *how: str) -> Any:
    words = [sys.executable, "-m", "tests.raypipe.launch.test_losses", str(folder), *how]
    ended = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["train", "task", "kept"])
def test_a_worker_killed_for_its_memory_is_told_apart(tmp_path, how):
    assert in_its_own_process(tmp_path, how) == ["host_out_of_memory"]


@pytest.mark.slow
def test_a_group_waits_for_its_lost_node_to_come_back(tmp_path):
    happened = in_its_own_process(tmp_path)
    assert happened["kinds"] == ["node_lost"]
    waits, goes_on = happened["said"]
    assert waits == "nodes were lost; waiting up to 10 minutes for others"
    assert goes_on.startswith("continues from step")
    alone = slow_job(tmp_path / "alone", 1, 0.0)
    InlineLauncher().train(alone, ignore)
    trained = slow_job(tmp_path, 2, 0.0)
    assert_same(outcome(trained), outcome(alone))


if __name__ == "__main__":
    where, *kind = sys.argv[1:]
    found = run_out_of_memory(Path(where), *kind) if kind else lose_a_node(Path(where))
    print(json.dumps(found))
