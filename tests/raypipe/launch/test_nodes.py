"""Room on the nodes: nodes that were lost are waited for, others are not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from raypipe.errors import ConfigError, UnitError
from raypipe.graph.launcher import PoolOptions
from raypipe.launch import nodes
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.nodes import TASKS, Wait
from tests.raypipe.launch.test_train import ignore, job

HEAD = {"CPU": 2.0}
GPU = {"CPU": 4.0, "GPU": 1.0}
WORKER = {"CPU": 4.0, TASKS: 4.0}
WAITS = "waiting up to 10 minutes for others"


def there(monkeypatch: pytest.MonkeyPatch, *each: Mapping[str, float], group: str = "") -> None:
    labels = {"ray.io/node-group": group} if group else {}
    found = [
        {"NodeID": str(number), "Alive": True, "Resources": node, "Labels": labels}
        for number, node in enumerate(each)
    ]
    monkeypatch.setattr(nodes.ray, "nodes", lambda: found)
    monkeypatch.setattr(nodes, "_LOOK_S", 0.0)


@pytest.mark.parametrize(
    "asked", [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0}, {"CPU": 1.0, TASKS: 1.0}]
)
def test_lost_nodes_are_waited_for_and_then_no_longer(asked, monkeypatch):
    said: list[str] = []
    there(monkeypatch, HEAD)
    wait = Wait(asked, 1, [HEAD, GPU | WORKER], said.append)
    assert not wait.is_vain("t")
    assert not wait.is_vain("t")
    assert said == [f"nodes were lost; {WAITS}"]
    there(monkeypatch, HEAD, GPU | WORKER)
    assert not wait.is_vain("t")
    monkeypatch.setattr(nodes, "WAIT_FOR_NODES_S", -1.0)
    there(monkeypatch, HEAD)
    assert wait.is_vain("t")
    assert len(said) == 2


def test_what_never_was_is_waited_for_where_the_cluster_may_grow(monkeypatch):
    said: list[str] = []
    there(monkeypatch, HEAD)
    assert Wait({"GPU": 1.0, "CPU": 1.0}, 2, [HEAD], said.append).is_vain("t")
    assert not said
    there(monkeypatch, HEAD, group="worker")
    assert not Wait({"CPU": 1.0, "GPU": 1.0}, 2, [HEAD], said.append).is_vain("t")
    assert said == [f"no room for 2 x 1 CPUs and 1 GPUs, and the cluster may grow; {WAITS}"]


def test_a_cluster_without_nodes_does_not_recover(monkeypatch):
    there(monkeypatch)
    with pytest.raises(UnitError, match="no node of the Ray cluster is alive"):
        Wait(HEAD, 1, [HEAD], ignore).is_vain("t")


def test_what_the_nodes_have_no_room_for_is_refused(launcher: RayLauncher, tmp_path):
    with (
        pytest.raises(ConfigError, match=r"asks for 512 CPUs .* no node has that"),
        launcher.pool(PoolOptions(512)),
    ):
        pass
    with pytest.raises(UnitError, match=r"3 worker.* of 512 CPUs each .* no room") as refused:
        launcher.train(job(tmp_path, 1, 1, 3, cpus_per_worker=512), ignore)
    assert refused.value.kind == "error"
