"""A node is announced to be lost while a run trains on it: a cluster of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from raypipe.errors import UnitError
from raypipe.launch.capacity import draining_nodes, living_nodes
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.inline import InlineLauncher
from raypipe.training.recovery import train_to_the_end
from tests.raypipe.launch.test_elastic import NODE, PROJECT, assert_same_run, slow_job
from tests.raypipe.launch.test_train import ignore, outcome

_NOTICE_S = 90.0


def announce(cluster: Cluster, node: str) -> None:
    """Announce that a node will be preempted, as an autoscaler does."""
    client = ray._raylet.GcsClient(address=cluster.address)
    accepted, why = client.drain_node(
        node,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "spot instance",
        int((time.time() + _NOTICE_S) * 1000),
    )
    assert accepted, why


def preempt(folder: Path, workers: Any) -> dict[str, Any]:
    """Train on two nodes; at step 20 the loss of one is announced, and another one comes."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    launcher = RayLauncher(cluster.address)
    happened: dict[str, Any] = {"said": [], "failures": []}

    def report(told: dict[str, Any] | str) -> None:
        if isinstance(told, str):
            happened["said"].append(told)
            if told.startswith("nodes were lost"):
                cluster.remove_node(second, allow_graceful=False)
                cluster.add_node(**NODE)
        elif told["step"] >= 20 and "announced" not in happened:
            happened["announced"] = time.time()
            announce(cluster, second.node_id)
            happened["draining"] = draining_nodes() == {second.node_id}
            happened["left"] = len(living_nodes())

    def on_failure(job: Any, error: UnitError, what: str) -> None:
        saved = job.run_dir.list(job.run_dir.checkpoints(job.trial_id))
        happened["failures"].append([error.kind, error.message, what, saved[-1]])
        happened["ended_s"] = time.time() - happened["announced"]

    asked = slow_job(folder, workers, 0.06)
    training = asked.settings.training.model_copy(update={"checkpoint_every": 1000})
    settings = asked.settings.model_copy(update={"training": training})  # none is due before
    asked = replace(asked, settings=settings)
    train_to_the_end(asked, lambda job: launcher.train(job, report), on_failure)
    launcher.close()
    cluster.shutdown()
    return happened


@pytest.mark.slow
def test_an_announced_loss_of_a_node_costs_no_step(tmp_path: Path) -> None:
    """The training ends with a checkpoint, and waits for a node that is not about to be lost."""
    command = [sys.executable, "-m", "tests.raypipe.launch.test_preemption", str(tmp_path)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    happened = json.loads(ended.stdout.splitlines()[-1])
    assert happened["draining"]
    assert happened["left"] == 1
    ((kind, message, what, saved),) = happened["failures"]
    step = int(saved.removeprefix("step_"))
    assert (kind, what) == ("node_lost", "again on other nodes")
    assert message == f"a node is about to be preempted; ended with a checkpoint at step {step}"
    assert happened["ended_s"] < _NOTICE_S
    assert happened["said"] == ["nodes were lost; waiting up to 10 minutes for others"]
    steps = [int(line.split()[0]) for line in (tmp_path / "notes").read_text().splitlines()]
    # each once, in two micro-batches: nothing was computed again
    assert steps == [step for step in range(400) for _ in range(2)]
    alone = slow_job(tmp_path / "alone", 1, 0.0)
    (tmp_path / "alone").mkdir()
    InlineLauncher().train(alone, ignore)
    assert_same_run(tmp_path, outcome(alone))


if __name__ == "__main__":
    print(json.dumps(preempt(Path(sys.argv[1]), 2)))
