"""Nodes go and come while a run trains: a cluster of its own, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ray.cluster_utils import Cluster

from raypipe.errors import UnitError
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.inline import InlineLauncher
from raypipe.store.tables import read_table
from raypipe.training.job import TrainingJob
from raypipe.training.recovery import train_to_the_end
from tests.raypipe.launch.test_train import (
    Regression,
    assert_equal,
    ignore,
    job,
    outcome,
)

PROJECT = Path(__file__).resolve().parents[3]
STEPS = 400
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


@dataclass(frozen=True)
class Slow(Regression):
    """Takes its time and notes how many workers there are."""

    notes: str
    seconds: float

    def loss(self, model, batch, context):
        workers = dist.get_world_size() if dist.is_initialized() else 1
        if not dist.is_initialized() or dist.get_rank() == 0:
            with Path(self.notes).open("a") as file:
                file.write(f"{context.step} {workers} {time.time()}\n")
        time.sleep(self.seconds)
        return super().loss(model, batch, context)


def slow_job(folder: Path, workers: Any, seconds: float) -> TrainingJob:
    asked = job(folder, 4, 2, 2, steps=STEPS)
    scaling = asked.settings.scaling.model_copy(update={"workers": workers})
    settings = asked.settings.model_copy(update={"scaling": scaling})
    return replace(asked, task=Slow(str(folder / "notes"), seconds), settings=settings)


def lose_a_node(folder: Path, workers: Any, back: Callable[[Any], bool]) -> dict[str, Any]:
    """Train on two nodes; one goes at step 20 and another comes when ``back`` of a report."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    launcher = RayLauncher(cluster.address)
    said: list[str] = []
    failures: list[tuple[int, str, float]] = []
    times: dict[str, float] = {}

    def report(told: dict[str, Any] | str) -> None:
        if isinstance(told, str):
            said.append(told)
        elif told["step"] >= 20 and "lost" not in times:
            times["lost"] = time.time()
            cluster.remove_node(second, allow_graceful=False)
        if "lost" in times and "back" not in times and back(told):
            times["back"] = time.time()
            cluster.add_node(**NODE)

    def on_failure(job: TrainingJob, error: UnitError, what: str) -> None:
        failures.append((job.attempt, error.kind, time.time()))

    train_to_the_end(
        slow_job(folder, workers, 0.06), lambda job: launcher.train(job, report), on_failure
    )
    launcher.close()
    cluster.shutdown()
    return {"said": said, "failures": failures, **times}


def main(folder: Path, how: str) -> None:
    """What the tests start: prints what happened as JSON."""
    if how == "elastic":
        happened = lose_a_node(
            folder, (1, 2), lambda told: isinstance(told, dict) and told["step"] >= 40
        )
    else:
        happened = lose_a_node(folder, 2, lambda told: isinstance(told, str))
    print(json.dumps(happened))


def rehearse(folder: Path, how: str) -> tuple[dict[str, Any], list[list[str]]]:
    command = [sys.executable, "-m", "tests.raypipe.launch.test_elastic", str(folder), how]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    notes = [line.split() for line in (folder / "notes").read_text().splitlines()]
    return json.loads(ended.stdout.splitlines()[-1]), notes


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The same run with one worker, undisturbed."""
    alone = slow_job(tmp_path_factory.mktemp("alone"), 1, 0.0)
    InlineLauncher().train(alone, ignore)
    return outcome(alone)


def assert_same_run(folder: Path, reference) -> None:
    asked = slow_job(folder, 2, 0.0)
    assert_equal(outcome(asked), reference)
    assert sorted(read_table(asked.run_dir, "steps")["step"]) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_an_elastic_group_goes_on_with_what_is_left_and_grows_again(tmp_path, reference):
    happened, notes = rehearse(tmp_path, "elastic")
    groups = [int(workers) for _, workers, _ in notes]
    sizes = [size for size, before in zip(groups, [0, *groups], strict=False) if size != before]
    assert sizes == [2, 1, 2]
    assert [kind for _, kind, _ in happened["failures"]] == ["node_lost"]
    assert_same_run(tmp_path, reference)


@pytest.mark.slow
def test_a_group_of_fixed_size_waits_for_the_node_to_come_back(tmp_path, reference):
    happened, notes = rehearse(tmp_path, "fixed")
    assert {workers for _, workers, _ in notes} == {"2"}
    assert [kind for _, kind, _ in happened["failures"]] == ["node_lost"]
    waits, goes_on = happened["said"]
    assert waits == "nodes were lost; waiting up to 10 minutes for others"
    assert goes_on.startswith("continues from step")
    assert_same_run(tmp_path, reference)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
