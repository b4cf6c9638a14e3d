"""The metric of a study: which rows it has, what is better, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.config.axes import AxisSettings
from raypipe.errors import ConfigError, UnitError
from raypipe.report.results import monitors_of
from raypipe.store.ledger import Ledger
from raypipe.store.tables import Column
from raypipe.study.metric import Metric, costs_of, with_metric, with_metric_of
from raypipe.study.sweep_settings import SweepSettings
from raypipe.training.job import ExternalTask
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import TrainTask
from tests.scenario import cases

CASES = cases(__file__, "metrics")
BOTH = [frozenset({"base", "a=1"}), frozenset({"base", "a=2"})]


@pytest.mark.parametrize("case", CASES["measured"], ids=str)
def test_the_value_of_a_metric_is_the_mean_over_points(case: dict[str, Any], run: Any) -> None:
    ledger = Ledger(run)
    ledger.put("measures", {str(place): row for place, row in enumerate(case["rows"])})
    metric = Metric("measures", "f1", case.get("where", {}))
    assert metric.measure(ledger, BOTH) == pytest.approx(case["value"], nan_ok=True)
    assert "lacks" not in case or metric.lacking(ledger) == case["lacks"]


# the metric of a sweep

DECLARED = {
    "": (),
    "both": (Column("eval_loss", "real", "."), Column("eval_accuracy", "real", ".")),
    "margin": (Column("eval_error_margin", "real", ".", better="higher"),),
}


class Plain(TrainTask):
    build_model = build_dataset = loss = None  # type: ignore[assignment]


class Script(ExternalTask):
    run = None  # type: ignore[assignment]


def resolved(
    task: str = "plain", declared: str = "", monitor: dict[str, Any] | None = None, **given: Any
) -> SweepSettings:
    """The section as the sweep of a task takes it."""
    axes = {"training.learning_rate": AxisSettings(values=[0.1, 0.2])}
    sweep = SweepSettings.model_validate(
        {"stage": "train", "axes": axes, "kind": "quality"} | given
    )
    configuration: Any = SimpleNamespace(
        experiment=SimpleNamespace(step_metrics=DECLARED[declared]),
        settings=SimpleNamespace(sweep=sweep),
        origin="digits.yaml",
    )
    kind = {"plain": Plain, "script": Script}[task]
    every = None if monitor is None else 5
    training = TrainingSettings(steps=5, monitor=monitor, eval_every=every)
    of_stage: Any = SimpleNamespace(
        settings=SimpleNamespace(training=training), task=lambda _: kind.__new__(kind)
    )
    return with_metric(configuration, of_stage)


def row(**given: Any) -> dict[str, Any]:
    return {"trial_id": "a", "status": "succeeded", "loss_final": 0.5, "samples_per_s": 9.0} | given


@pytest.mark.parametrize(("given", "metric", "mode"), CASES["resolved"])
def test_the_metric_of_a_sweep_and_what_is_better(given: Any, metric: str, mode: str) -> None:
    sweep = resolved(**given)
    assert (sweep.metric, sweep.mode) == (metric, mode)


@pytest.mark.parametrize(("given", "message"), CASES["refused"])
def test_a_metric_that_no_trial_will_have_is_refused(given: Any, message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        resolved(**given)


def test_a_metric_that_may_be_there_is_known_after_the_first_trial() -> None:
    for task in ("plain", "script"):
        sweep = resolved(task, metric="eval_acc")
        with pytest.raises(UnitError, match="did you mean eval_accuracy") as error:
            with_metric_of(sweep, row(eval_accuracy=0.5, eval_loss=0.1))
        assert "it has: eval_accuracy, eval_loss, loss_final" in str(error.value)
        # a value that is not finite, or that this machine does not measure, is not a mistake
        assert with_metric_of(sweep, row(eval_acc=None)) == sweep
    assert costs_of(resolved(metric="mfu"), row()) is None


@pytest.mark.parametrize(("names", "column", "mode"), CASES["first_trial"])
def test_by_default_the_first_trial_decides(names: list[str], column: str, mode: str) -> None:
    finished = row(**dict.fromkeys(names, 0.5))
    sweep = with_metric_of(resolved(declared="both"), finished, DECLARED["both"])
    assert (sweep.metric, sweep.mode) == (column, mode)
    assert costs_of(sweep, finished) == [-0.5 if mode == "max" else 0.5]


@pytest.mark.parametrize(("sections", "monitors"), CASES["monitored"])
def test_the_report_takes_what_a_training_monitors_or_a_sweep_compares(sections, monitors) -> None:
    assert monitors_of(sections) == monitors
