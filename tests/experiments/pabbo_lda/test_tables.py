"""Declared tables of the main job against the rows that it writes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from experiments.pabbo_lda.pabbo.curve_training import CurvePolicySettings, CurvePolicyTask
from experiments.pabbo_lda.pabbo.training import PabboSettings, PabboTask
from experiments.pabbo_lda.study.comparison import aggregate
from experiments.pabbo_lda.tables import STEP_METRICS, TABLES
from raypipe.store.ledger import Row
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import by_name, read_table, write_table
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import StepContext
from tests.experiments.pabbo_lda.test_comparison import HAND, history
from tests.experiments.pabbo_lda.test_runner import run, study_settings

DECLARED = by_name(TABLES)
BROKEN = {"broken": [[math.inf] * 3, [math.nan, 7.0, 6.0]], "c": [[1e44, 5.0], [2e44, math.inf]]}


def written(folder: Path, name: str, rows: list[Row]) -> None:
    """Check that rows have exactly the declared columns, and values of their types."""
    table = DECLARED[name]
    columns = {column.name for column in table.columns}
    assert {key for row in rows for key in row} - columns == set()
    write_table(RunDirectory.at(folder), table, rows, "run")
    assert len(read_table(RunDirectory.at(folder), name)) == len(rows)


@pytest.mark.parametrize("values", [HAND, BROKEN, {"a": [[math.inf] * 3], "b": [[math.nan] * 3]}])
def test_tables_of_comparisons_are_declared(values, tmp_path):
    rows = history(values) + history(values, dataset="other")
    written(tmp_path, "study_history", rows)
    tables = aggregate(rows)
    for name, found in tables.items():
        written(tmp_path, name, list(found.values()))
        if found:
            columns = {column.name for column in DECLARED[name].columns}
            assert columns == {key for row in found.values() for key in row}, name


def test_tables_of_studies_are_declared(tmp_path):
    lda = study_settings(
        cache=False, datasets=("hills",), optimizers=("ga", "random"), runs=1, eta=(0.01, 1.0)
    )
    ledger, _, error = run(tmp_path / "run", lda)
    assert error is None
    found = set()
    for name in ("evaluations", "studies", "study_history"):
        rows = ledger.rows(name)
        written(tmp_path, name, rows)
        found |= {key for row in rows for key in row}
    assert {"eta", "best_eta"} <= found


def test_metrics_of_the_trainings_are_declared():
    small = TrainingSettings(steps=4)
    tiny = {"query_points": 9, "candidate_pairs": 12, "horizon": 4, "policy_batch": 2}
    evaluation = {"functions": 2, "steps": 2, "query_points": 9, "candidate_pairs": 12}
    found = set()
    for task in (
        PabboTask(PabboSettings.model_validate({**tiny, "evaluation": evaluation})),
        CurvePolicyTask(CurvePolicySettings(held_out=4, steps=2)),
    ):
        model = task.build_model()
        for phase in task.phases(small, 2):
            batch = torch.arange(2)
            found |= task.loss(model, batch, StepContext(0, phase, 0)).metrics.keys()
        measures = task.evaluate(model, torch.device("cpu"), 2)
        found |= {f"eval_{name}" for name in measures}
    assert found == {column.name for column in STEP_METRICS}
