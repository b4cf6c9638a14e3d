"""What a training asks of the nodes: automatic workers, and MIG slices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.runner import _beside
from raypipe.graph.training_stage import with_cpus
from raypipe.hardware import Gpu, Hardware
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.training.settings import TrainStageSettings, automatic_workers, obstacle
from tests import scenario

CASES = scenario.cases(__file__, "tables")
SLICES = tuple(Gpu(0, f"MIG-{n}", "card MIG 1g", 2**33, "9.0") for n in range(4))
SLICED = Hardware("node", 16, 2**34, SLICES)


def node(gpus: int, cpus: int) -> Hardware:
    cards = tuple(Gpu(n, f"GPU-{n}", "card", 2**34, "9.0") for n in range(gpus))
    return Hardware("node", cpus, 2**34, cards)


def settings(**scaling: Any) -> TrainStageSettings:
    return TrainStageSettings.model_validate({"scaling": scaling})


@pytest.mark.parametrize(
    ("nodes", "batch", "trainings", "scaling", "expected"),
    CASES["workers"],
)
def test_it_is_what_fits_on_a_share_of_the_gpus(nodes, batch, trainings, scaling, expected):
    found = [node(*each) for each in nodes]
    resolved = settings(**scaling).with_gpus(sum(gpus for gpus, _ in nodes))
    assert (resolved.scaling.workers, resolved.scaling.worker_count) == ("auto", 1)
    assert automatic_workers(resolved, batch, found, trainings) == expected


def test_a_training_on_mig_slices_has_one_worker() -> None:
    assert automatic_workers(settings().with_gpus(4), 64, [SLICED]) == 1


@dataclass
class Job:
    settings: TrainStageSettings
    measured: bool = False


@pytest.mark.parametrize(("asked", "on_ray", "cpus"), [("auto", 1, 2), ("auto", 0, 8), (3, 1, 3)])
def test_a_worker_has_the_cpus_that_others_leave(asked, on_ray, cpus) -> None:
    """Each of two workers, beside a stage that may run at the same time, on the smaller node."""
    nodes, launcher = [node(0, 8), node(0, 9)], SimpleNamespace(concurrent=on_ray)
    context: Any = Mock(session=Mock(nodes=nodes, launcher=launcher), beside=lambda: ["other"])
    job: Any = Job(settings(workers=2, cpus_per_worker=asked))
    assert with_cpus(context, job).settings.scaling.reserved_cpus == cpus


@pytest.mark.parametrize(("given", "slices", "expected"), CASES["obstacles"])
def test_what_the_nodes_or_other_settings_rule_out(given, slices, expected):
    """Refused before anything starts; a sweep skips such points and says why."""
    asked = TrainStageSettings.model_validate(given)
    found = obstacle("train", asked, [replace(SLICED, gpus=SLICED.gpus[:slices])])
    assert (found and [found.key, found.reason]) == expected


def test_only_stages_that_can_run_at_the_same_time_share_the_resources(tmp_path: Path) -> None:
    def stage(name: str, *needs: str) -> Stage:
        return Stage(name, print, [Unit(name)], needs)

    stages = [stage("a"), stage("b"), stage("c", "a"), stage("d", "c"), stage("e", "b", "c")]
    ledger = Ledger(RunDirectory.at(tmp_path))

    def beside(place: int) -> str:
        return "".join(other.name for other in _beside(stages[place], stages, ledger))

    assert [beside(place) for place in range(5)] == ["b", "acd", "b", "be", "d"]
