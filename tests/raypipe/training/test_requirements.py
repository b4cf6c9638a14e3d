"""What a training asks of the nodes: automatic workers, and MIG slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from example_tasks import Regression, job

from raypipe.graph.experiment import Stage, Training, Unit
from raypipe.graph.runner import _beside
from raypipe.graph.training_stage import job_of, train_stage, with_cpus
from raypipe.hardware import Gpu, Hardware
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.job import ExternalTask
from raypipe.training.settings import TrainStageSettings, automatic_workers, obstacle
from tests import scenario

CASES = scenario.cases(__file__, "tables")


def node(gpus: int, cpus: int, kind: str = "GPU") -> Hardware:
    cards = tuple(Gpu(n, f"{kind}-{n}", "card", 2**34, "9.0") for n in range(gpus))
    return Hardware("node", cpus, 2**34, cards)


def settings(**scaling: Any) -> TrainStageSettings:
    return TrainStageSettings.model_validate({"scaling": scaling})


@pytest.mark.parametrize(
    ("nodes", "batch", "trainings", "scaling", "expected"),
    CASES["workers"],
)
def test_it_is_what_fits_on_a_share_of_the_gpus(nodes, batch, trainings, scaling, expected):
    found = [node(*each) for each in nodes]
    resolved = settings(**scaling).with_gpus(sum(gpus for gpus, *_ in nodes))
    assert (resolved.scaling.workers, resolved.scaling.worker_count) == ("auto", 1)
    stage = train_stage("train", resolved, lambda *_: Regression())
    gpus = scaling.get("gpus_per_worker", 1.0 if any(gpus for gpus, *_ in nodes) else 0.0)
    assert (resolved.scaling.gpus_per_worker, stage.on_gpu) == (gpus, gpus > 0)
    assert automatic_workers(resolved, batch, found, trainings) == expected


@pytest.mark.parametrize(("given", "on_ray", "measured", "expected"), CASES["cpus"])
def test_a_worker_has_the_cpus_that_others_leave(given, on_ray, measured, expected) -> None:
    """Beside a stage that may run at the same time, on the smaller node."""
    nodes, launcher = [node(0, 8), node(0, 9)], SimpleNamespace(concurrent=on_ray)
    context: Any = Mock(session=Mock(nodes=nodes, launcher=launcher), beside=lambda: ["other"])
    asked = TrainStageSettings.model_validate(given)
    begun = replace(job(Regression(), Path()), settings=asked, measured=measured)
    scaling = with_cpus(context, begun).settings.scaling
    assert [scaling.reserved_cpus, scaling.threads] == expected


@pytest.mark.parametrize(("workers", "gpus", "sizes", "plan"), CASES["plans"])
def test_a_training_has_the_workers_that_are_asked_for(workers, gpus, sizes, plan) -> None:
    """``auto`` shares the GPUs with trainings at the same time: of three stages one may be."""
    others = [Mock(training=t, on_gpu=gpu) for t, gpu in ((1, True), (None, True), (1, False))]
    session = MagicMock(nodes=[node(len(gpus), 16)], gpus=gpus)
    context: Any = Mock(session=session, beside=lambda: others)
    asked = settings(workers=workers).changed("training", **sizes)
    training = Training(asked, lambda *_: Regression())
    unit: Any = Mock(fingerprint="", extents={})
    assert job_of(context, unit, training, None).plan == BatchPlan(*plan)
    assert context.device == (gpus or ["cpu"])[0]


@pytest.mark.parametrize(("given", "expected"), CASES["scripts"])
def test_one_worker_of_a_script_holds_what_all_workers_would(given, expected) -> None:
    assert ExternalTask.placed(Mock(), settings(**given)) == settings(**expected)


@pytest.mark.parametrize(("given", "slices", "expected"), CASES["obstacles"])
def test_what_the_nodes_or_other_settings_rule_out(given, slices, expected):
    """Refused before anything starts; a sweep skips such points and says why."""
    asked = TrainStageSettings.model_validate(given)
    found = obstacle("train", asked, [node(slices, 16, "MIG")])
    assert (found and [found.key, found.reason]) == expected


def test_only_stages_that_can_run_at_the_same_time_share_the_resources(tmp_path: Path) -> None:
    def stage(name: str, *needs: str) -> Stage:
        return Stage(name, print, [Unit(name)], needs)

    stages = [stage("a"), stage("b"), stage("c", "a"), stage("d", "c"), stage("e", "b", "c")]
    ledger = Ledger(RunDirectory.at(tmp_path))

    def beside(place: int) -> str:
        return "".join(other.name for other in _beside(stages[place], stages, ledger))

    assert [beside(place) for place in range(5)] == ["b", "acd", "b", "be", "d"]
