"""A node goes and comes while a run trains: a cluster of its own, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from raypipe.errors import UnitError
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.inline import InlineLauncher
from raypipe.training.job import TrainingJob
from raypipe.training.recovery import train_to_the_end
from tests.raypipe.examples.example_tasks import Regression, outcome
from tests.raypipe.launch.test_train import assert_same, ignore, job

PROJECT = Path(__file__).resolve().parents[3]
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


def main(folder: Path) -> None:
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
    print(json.dumps({"said": said, "kinds": kinds}))


@pytest.mark.slow
def test_a_group_waits_for_its_lost_node_to_come_back(tmp_path):
    command = [sys.executable, "-m", "tests.raypipe.launch.test_lost_node", str(tmp_path)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    happened = json.loads(ended.stdout.splitlines()[-1])
    assert happened["kinds"] == ["node_lost"]
    waits, goes_on = happened["said"]
    assert waits == "nodes were lost; waiting up to 10 minutes for others"
    assert goes_on.startswith("continues from step")
    alone = slow_job(tmp_path / "alone", 1, 0.0)
    InlineLauncher().train(alone, ignore)
    trained = slow_job(tmp_path, 2, 0.0)
    assert_same(outcome(trained), outcome(alone))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
