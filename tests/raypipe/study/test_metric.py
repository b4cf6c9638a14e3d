"""The metric of a point: which rows it has, their mean, and messages if there is none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config.search import MetricSettings
from raypipe.errors import ConfigError
from raypipe.graph.tables import CORE
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import by_name
from raypipe.study.metric import Metric, metric_of

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


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_the_mean_lies_between_the_values(values):
    class Rows:
        def rows(self, table: str) -> list[dict]:
            return [{"f1": value} for value in values]

    found = Metric("measures", "f1", {}).measure(Rows(), [frozenset({"base"})])
    assert min(values) - 1e-6 <= found.value <= max(values) + 1e-6


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
