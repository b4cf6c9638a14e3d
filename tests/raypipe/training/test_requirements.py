"""What a training asks of the nodes: automatic workers, and MIG slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.runner import _beside
from raypipe.hardware import Gpu, Hardware
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.training.settings import TrainStageSettings, automatic_workers, obstacle
from tests import scenario


def node(gpus: int, cpus: int) -> Hardware:
    cards = tuple(Gpu(n, f"GPU-{n}", "card", 2**34, "9.0") for n in range(gpus))
    return Hardware("node", cpus, 2**34, cards)


def settings(**scaling: Any) -> TrainStageSettings:
    return TrainStageSettings.model_validate({"scaling": scaling})


@pytest.mark.parametrize(
    ("nodes", "batch", "trainings", "scaling", "expected"),
    scenario.cases(__file__, "tables")["workers"],
)
def test_it_is_what_fits_on_a_share_of_the_gpus(nodes, batch, trainings, scaling, expected):
    found = [node(*each) for each in nodes]
    resolved = settings(**scaling).with_gpus(sum(gpus for gpus, _ in nodes))
    assert (resolved.scaling.workers, resolved.scaling.worker_count) == ("auto", 1)
    assert automatic_workers(resolved, batch, found, trainings) == expected


def test_a_training_on_mig_slices_has_one_worker() -> None:
    slices = tuple(Gpu(0, f"MIG-{n}", "card MIG 1g", 2**33, "9.0") for n in range(4))
    nodes = [Hardware("node", 16, 2**34, slices)]
    assert automatic_workers(settings().with_gpus(4), 64, nodes) == 1
    found = obstacle("train", settings(workers=2), nodes)
    assert found is not None
    assert found.key == "train.scaling.workers"
    assert found.reason == "NCCL does not connect MIG slices"
    assert obstacle("train", settings(workers=2, gpus_per_worker=0), nodes) is None
    assert obstacle("train", settings(), nodes) is None


def test_only_stages_that_can_run_at_the_same_time_share_the_resources(tmp_path: Path) -> None:
    def stage(name: str, *needs: str) -> Stage:
        return Stage(name, print, [Unit(name)], needs)

    stages = [stage("a"), stage("b"), stage("c", "a"), stage("d", "c"), stage("e", "b", "c")]
    ledger = Ledger(RunDirectory.at(tmp_path))

    def beside(place: int) -> str:
        return "".join(other.name for other in _beside(stages[place], stages, ledger))

    assert [beside(place) for place in range(5)] == ["b", "acd", "b", "be", "d"]
