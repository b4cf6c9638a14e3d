"""Nodes that are lost between two stages are waited for and asked for; others are not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from raypipe.errors import ConfigError, UnitError
from raypipe.launch import admission, capacity, pool, train, tune
from raypipe.launch.admission import Admission
from raypipe.launch.capacity import TASKS
from raypipe.launch.pool import await_room
from raypipe.pipeline.allocator import Claim
from raypipe.pipeline.launcher import PoolOptions
from raypipe.storage.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.settings import TrainStageSettings

HEAD = {"CPU": 2.0}
GPU = {"CPU": 4.0, "GPU": 1.0}
WORKER = {"CPU": 4.0, TASKS: 4.0}
Nodes = list[Mapping[str, float]]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[Nodes]:
    """The nodes at each look; the last ones stay."""
    looks: list[Nodes] = []

    def living_nodes() -> dict[str, Mapping[str, float]]:
        nodes = looks.pop(0) if len(looks) > 1 else looks[0]
        return {str(number): node for number, node in enumerate(nodes)}

    for module in (admission, capacity, pool, train, tune):
        monkeypatch.setattr(module, "living_nodes", living_nodes)
    monkeypatch.setattr(capacity, "_POLL_S", 0.0)
    grows(monkeypatch, {f"node_{'f' * 56}": 1})
    return looks


def grows(monkeypatch: pytest.MonkeyPatch, types: dict[str, int] | None) -> None:
    """Report these types of nodes as Ray's autoscaler does; None without an autoscaler."""
    status = {"autoscaler_report": {"active_nodes": types}} if types is not None else {}
    monkeypatch.setattr(capacity, "_internal_kv_get", lambda key: json.dumps(status).encode())


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[dict[str, float]]]]:
    """What an autoscaler was asked for; each request is withdrawn in the end."""
    requests: list[list[dict[str, float]]] = []
    withdrawn: list[int] = []

    def placement_group(bundles: list[dict[str, float]]) -> int:
        requests.append(bundles)
        return len(requests)

    monkeypatch.setattr(capacity, "placement_group", placement_group)
    monkeypatch.setattr(capacity, "remove_placement_group", withdrawn.append)
    yield requests
    assert withdrawn == list(range(1, len(requests) + 1))


@pytest.mark.parametrize(
    ("options", "lost"),
    [(PoolOptions(gpus=1.0), GPU), (PoolOptions(cpus=4.0), WORKER)],
    ids=["gpu", "tasks"],
)
def test_a_pool_waits_for_a_node_that_was_there(there, asked, options, lost):
    said: list[str] = []
    there[:] = [*[[HEAD]] * 6, [HEAD, lost]]
    await_room(options, Admission([HEAD, lost]), said.append)
    assert said == ["nodes were lost; waiting up to 10 minutes for others"]
    assert asked == [[{"CPU": 1.0, "GPU": 1.0} if options.gpus else WORKER]]


def test_a_pool_does_not_wait_for_what_never_was(there, monkeypatch):
    said: list[str] = []
    there[:] = [[HEAD]]
    options = PoolOptions(gpus=1.0)
    with pytest.raises(ConfigError, match="no node has that"):
        await_room(options, Admission([HEAD]), said.append)
    assert not said
    monkeypatch.setattr(capacity, "WAIT_FOR_NODES_S", 0.0)
    with pytest.raises(ConfigError, match="no node has that"):
        await_room(options, Admission([HEAD, GPU]), said.append)
    assert len(said) == 1


def a_job(folder: Path, scaling: dict[str, float]) -> TrainingJob:
    settings = TrainStageSettings.model_validate({"scaling": scaling})
    workers = settings.scaling.most_workers
    plan, run = BatchPlan(1, 1, 1, workers=workers), RunDirectory.at(folder)
    return TrainingJob("t", "run", None, settings, plan, run)  # type: ignore[arg-type]


def test_a_first_training_waits_too_and_an_interrupt_ends_that(there, asked, tmp_path):
    job = a_job(tmp_path, {"cpus_per_worker": 2.0, "workers": 3})
    said: list[str] = []
    there[:] = [*[[HEAD]] * 5, [HEAD, GPU]]
    train.await_workers(job, said.append, Admission([HEAD, GPU]))
    assert said == ["nodes were lost; waiting up to 10 minutes for others"]
    assert asked == [[{"CPU": 2.0}] * 3]
    there[:] = [[HEAD]]
    with pytest.raises(UnitError, match="has room for 1; lower one of the three") as refused:
        train.await_workers(job, said.append, Admission([HEAD]))
    assert refused.value.kind == "error"
    admission = Admission([HEAD, GPU])
    admission.interrupt()
    with pytest.raises(KeyboardInterrupt):
        train.await_workers(job, said.append, admission)


def test_the_end_of_the_last_work_does_not_wait_for_rays_servers(there, monkeypatch):
    """A signal to the process group ends them, too."""
    there[:] = [[HEAD]]
    admitted = Admission([HEAD])
    monkeypatch.setattr(admission, "_LOOK_S", 0.0)
    with admitted.lease(Claim({"CPU": 1.0}), 0.0, lambda: None):
        there.clear()  # a look raises


def test_the_next_trial_of_a_sweep_waits_too(there, asked, tmp_path):
    jobs = [a_job(tmp_path, {"gpus_per_worker": 1.0})]

    class Trials:
        is_over = True

        def next(self) -> TrainingJob | None:
            return jobs.pop() if jobs else None

    order = tune._Order(Trials(), None, Admission([HEAD, GPU]))  # type: ignore[arg-type]
    there[:] = [[HEAD]]
    assert order.suggest("1") is None
    assert order.suggest("1") is None
    assert asked == [[{"CPU": 1.0, "GPU": 1.0}]]
    there[:] = [[HEAD, GPU]]
    assert order.suggest("1")["mailbox"] is None
    assert order.suggest("2") == tune.Searcher.FINISHED
    order.close()


def test_work_waits_for_nodes_that_an_autoscaler_may_add(there, asked, monkeypatch, tmp_path):
    grows(monkeypatch, {"ray.head.default": 1})
    said: list[str] = []
    there[:] = [*[[HEAD]] * 5, [HEAD, GPU, GPU]]
    job = a_job(tmp_path, {"gpus_per_worker": 1.0, "workers": 2})
    train.await_workers(job, said.append, Admission([HEAD]))
    there[:] = [*[[HEAD]] * 6, [HEAD, GPU]]
    await_room(PoolOptions(gpus=1.0), Admission([HEAD]), said.append)
    assert said == [
        "needs 2 worker(s) of 1 CPUs and 1 GPUs each; the cluster has room for 0 and may grow; "
        "waiting up to 10 minutes for others",
        "a task needs 1 CPUs and 1 GPUs; no node has that and the cluster may grow; "
        "waiting up to 10 minutes for others",
    ]
    assert asked == [[{"CPU": 1.0, "GPU": 1.0}] * 2, [{"CPU": 1.0, "GPU": 1.0}]]
    there[:] = [[HEAD]]
    monkeypatch.setattr(capacity, "WAIT_FOR_NODES_S", 0.0)
    with pytest.raises(UnitError, match="has room for 0; lower one"):
        train.await_workers(job, said.append, Admission([HEAD]))


@pytest.mark.parametrize(
    ("types", "expected"),
    [({f"node_{'0a' * 28}": 1}, False), (None, False), ({}, True), ({"gpu": 2}, True)],
)
def test_a_cluster_may_grow_if_an_autoscaler_knows_its_types(monkeypatch, types, expected):
    grows(monkeypatch, types)
    assert capacity.may_grow() is expected


def test_a_local_cluster_does_not_grow(launcher):
    del launcher
    assert capacity._internal_kv_get(capacity.DEBUG_AUTOSCALING_STATUS)
    assert not capacity.may_grow()
