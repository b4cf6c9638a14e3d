"""The metric of a study: which rows it has, what is better, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import TensorDataset

from raypipe.config.axes import AxisSettings
from raypipe.config.search import MetricSettings
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.tables import CORE
from raypipe.report.measures import monitors_of
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Column, by_name
from raypipe.study.metric import (
    Metric,
    Objective,
    declared_columns,
    direction,
    metric_of,
    with_metric,
)
from raypipe.study.sweep_settings import SweepSettings
from raypipe.training.job import ExternalTask
from raypipe.training.settings import MonitorSettings, TrainingSettings
from raypipe.training.task import TrainTask

TABLES = by_name(CORE)
BOTH = [frozenset({"base", "a=1"}), frozenset({"base", "a=2"})]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(RunDirectory.at(tmp_path / "run"))


def put(ledger: Ledger, *rows: dict) -> None:
    ledger.put("measures", {str(place): row for place, row in enumerate(rows)})


def test_rows_are_averaged_within_a_point_and_then_over_points(ledger):
    put(
        ledger,
        {"variant": "a=1", "method": "x", "f1": 1.0},
        {"variant": "a=1", "method": "x", "f1": 3.0},
        {"variant": "a=2", "method": "x", "f1": 10.0},
        {"variant": "a=2", "method": "y", "f1": 99.0},
        {"variant": "a=3", "method": "x", "f1": 99.0},
        {"variant": "a=1", "method": "x", "f1": None},
    )
    found = Metric("measures", "f1", {"method": "x"}).measure(ledger, BOTH)
    assert (found.value, found.rows) == (6.0, 3)
    several = Metric("measures", "f1", {"method": ["x", "y"]})
    assert several.measure(ledger, BOTH).value == (2.0 + 54.5) / 2


def test_a_row_that_all_points_share_belongs_to_each(ledger):
    put(ledger, {"method": "x", "f1": 5.0})  # rows of the variant base have no such column
    assert Metric("measures", "f1", {}).measure(ledger, BOTH).value == 5.0


@pytest.mark.parametrize("other", [{"f1": math.nan}, {"f1": math.inf}, {"f1": None}])
def test_a_mean_of_which_a_part_is_missing_is_missing(ledger, other):
    put(ledger, {"variant": "a=1", "f1": 1.0}, {"variant": "a=2", **other})
    found = Metric("measures", "f1", {}).measure(ledger, BOTH)
    assert found.value is None
    assert found.rows


def test_true_is_not_one(ledger):
    put(ledger, {"flag": True, "f1": 1.0}, {"flag": 1, "f1": 3.0})
    assert Metric("measures", "f1", {"flag": True}).measure(ledger, BOTH).value == 1.0
    assert Metric("measures", "f1", {"flag": 1}).measure(ledger, BOTH).value == 3.0


def test_the_direction_is_what_the_table_declares():
    loss = MetricSettings(metric="trials.loss_final", where={"stage": "train"})
    assert metric_of(loss, TABLES, "here").name == "trials.loss_final (train)"
    assert metric_of(loss, TABLES, "here").mode == "min"
    assert metric_of(loss.model_copy(update={"mode": "max"}), TABLES, "here").mode == "max"
    with pytest.raises(ConfigError, match="give mode: min or mode: max"):
        metric_of(MetricSettings(metric="stages.duration_s"), TABLES, "here")


def test_steps_are_no_metric_of_a_point():
    with pytest.raises(ConfigError, match="take the table trials"):
        metric_of(MetricSettings(metric="steps.loss"), TABLES, "here")


# the metric of a sweep

DECLARED = (Column("eval_loss", "real", "."), Column("eval_accuracy", "real", "."))


class Plain(TrainTask):
    build_model = build_dataset = loss = None  # type: ignore[assignment]


class HeldOut(Plain):
    def build_eval_dataset(self) -> Any:
        return TensorDataset()


class Script(ExternalTask):
    run = None  # type: ignore[assignment]


def sweep(**given: Any) -> SweepSettings:
    axes = {"training.learning_rate": AxisSettings(values=[0.1, 0.2])}
    return SweepSettings.model_validate({"stage": "train", "axes": axes, "kind": "quality"} | given)


def resolved(
    task: type = HeldOut, declared: Any = (), monitor: MonitorSettings | None = None, **given: Any
) -> SweepSettings:
    """The section as the sweep of a task takes it."""
    experiment = SimpleNamespace(step_metrics=declared)
    settings = SimpleNamespace(sweep=sweep(**given))
    configuration: Any = SimpleNamespace(
        experiment=experiment, settings=settings, origin="digits.yaml"
    )
    every = 5 if monitor is not None else None
    training = TrainingSettings(steps=5, monitor=monitor, eval_every=every)
    of_stage: Any = SimpleNamespace(
        settings=SimpleNamespace(training=training), task=lambda _: task.__new__(task)
    )
    return with_metric(configuration, of_stage)


def objective(declared: Any = (), **given: Any) -> Objective:
    configuration: Any = SimpleNamespace(experiment=SimpleNamespace(step_metrics=declared))
    return Objective(sweep(**given), declared_columns(configuration))


def row(**given: Any) -> dict[str, Any]:
    return {"trial_id": "a", "status": "succeeded", "loss_final": 0.5, "samples_per_s": 9.0} | given


@pytest.mark.parametrize(
    ("metric", "task", "mode"),
    [
        ("eval_accuracy", HeldOut, "max"),
        ("eval_acc", Script, "max"),
        ("eval_loss", HeldOut, "min"),
        ("mfu", HeldOut, "max"),
        ("step_time_s", HeldOut, "min"),
    ],
)
def test_the_name_of_a_metric_tells_what_is_better(metric: str, task: type, mode: str) -> None:
    assert resolved(task, metric=metric).mode == mode
    assert resolved(task, metric=metric, mode="min").mode == "min"


def test_a_declaration_and_a_monitor_come_before_the_name() -> None:
    declared = (Column("eval_error_margin", "real", ".", better="higher"),)
    assert resolved(declared=declared, metric="eval_error_margin").mode == "max"
    assert direction("eval_x", (), {"eval_x": "higher"}) == "max"
    monitor = MonitorSettings(metric="x", mode="max")
    assert resolved(monitor=monitor, metric="eval_x").mode == "max"
    assert resolved(monitor=MonitorSettings(metric="accuracy")).mode == "max"
    assert resolved(monitor=MonitorSettings(metric="accuracy", mode="min")).mode == "min"
    assert resolved(monitor=MonitorSettings(metric="x")).mode == "min"
    with pytest.raises(ConfigError, match=r"eval_x: nothing tells.*give sweep.mode: min or"):
        resolved(metric="eval_x")
    with pytest.raises(ValueError, match="mode = min: of which metric"):
        sweep(mode="min")


@pytest.mark.parametrize(
    ("task", "declared", "metric", "message"),
    [
        (HeldOut, DECLARED, "eval_acc", "not a declared metric; did you mean eval_accuracy?"),
        (Plain, (), "eval_acc", "has no held-out data .*take loss_final"),
        (HeldOut, (), "loss", "not a number of the table trials; did you mean loss_final?"),
    ],
)
def test_a_metric_that_no_trial_will_have_is_refused_before_the_start(
    task: type, declared: Any, metric: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(task, declared, metric=metric)


def test_a_metric_that_may_be_there_is_known_after_the_first_trial() -> None:
    for task in (HeldOut, Script):
        assert resolved(task, metric="eval_acc").metric == "eval_acc"
    found = objective(metric="eval_acc", mode="max")
    with pytest.raises(UnitError, match="did you mean eval_accuracy") as error:
        found.settle(row(eval_accuracy=0.5, eval_loss=0.1))
    assert "it has: eval_accuracy, eval_loss, loss_final" in str(error.value)
    # a value that is not finite, or that this machine does not measure, is not a mistake
    found.settle(row(eval_acc=None))
    assert objective(metric="mfu", mode="max").costs(row()) is None


def test_the_default_is_the_monitored_metric_then_a_held_out_one_then_the_loss() -> None:
    assert resolved(kind="systems").metric == "samples_per_s"
    given = resolved(monitor=MonitorSettings(metric="accuracy", mode="max"))
    assert (given.metric, given.mode) == ("eval_accuracy", "max")
    assert resolved().metric is None
    assert resolved(scheduler={"name": "asha"}).metric == "loss_final"
    for names, column, mode in (
        (["eval_loss", "eval_accuracy"], "eval_accuracy", "max"),
        (["eval_loss"], "eval_loss", "min"),
        ([], "loss_final", "min"),
    ):
        found = objective(DECLARED)
        finished = row(**dict.fromkeys(names, 0.5))
        found.settle(finished)
        assert found.costs(finished) == [-0.5 if mode == "max" else 0.5]
        assert (found.column, found.mode) == (column, mode)


def test_the_report_takes_the_metric_of_a_sweep_first() -> None:
    assert monitors_of({"sweep": {"metric": "eval_x", "mode": "max"}}) == {"eval_x": "higher"}
    assert monitors_of({"sweep": {"metric": "eval_acc", "mode": None}}) == {"eval_acc": "higher"}
    assert monitors_of({"sweep": {"metric": "samples_per_s", "mode": None}}) == {}
