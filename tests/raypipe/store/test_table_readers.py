"""Tables of different runs, read together by pandas, polars and DuckDB with no options."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pytest

from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.raypipe.examples.sweeping import sweep

PLAIN = """
experiment: example_sweep
train:
  training: {steps: 20, effective_batch: 16, micro_batch: 16, log_every: 5, eval_every: 10}
"""
SWEPT = f"""{PLAIN}
sweep:
  stage: train
  kind: quality
  axes: {{training.learning_rate: [0.01, 0.1], width: [2, 4]}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that evaluates, a sweep, and a run that failed and has empty tables."""
    folder = tmp_path_factory.mktemp("runs")
    assert sweep(PLAIN, folder / "a") is None
    assert sweep(SWEPT, folder / "b") is None
    assert sweep(PLAIN, folder / "c", ("fail=true",)) is not None
    return folder


@pytest.mark.parametrize("table", ["stages", "trials", "steps", "failures"])
def test_a_table_of_several_runs_is_read_as_one(runs: Path, table: str) -> None:
    pattern = str(runs / "*" / "results" / table / "*.parquet")
    files = sorted(runs.glob(f"*/results/{table}/*.parquet"))
    frames = [
        pd.read_parquet(files),
        pl.read_parquet(pattern).to_pandas(),
        duckdb.sql(f"select * from '{pattern}'").df(),
    ]
    single = [read_table(RunDirectory.at(runs / name), table) for name in "abc"]
    for frame in frames:
        assert len(frame) == sum(map(len, single))
        assert set(frame.columns) == set(frames[0].columns) >= set(single[1].columns)
    types = {str(pl.read_parquet_schema(file)) for file in files}
    assert len(types) == 1


def test_the_axes_of_a_sweep_are_columns(runs: Path) -> None:
    points = pl.read_parquet(str(runs / "b" / "results" / "sweep_points" / "*.parquet"))
    assert points["train.training.learning_rate"].dtype == pl.Float64
    assert points["width"].dtype == pl.Int64
    pairs = points.select("train.training.learning_rate", "width").rows()
    assert sorted(pairs) == [(0.01, 2), (0.01, 4), (0.1, 2), (0.1, 4)]
    trials = pd.read_parquet(runs / "b" / "results" / "trials")
    swept = trials[trials["stage"] == "sweep"]
    assert sorted(swept["learning_rate"]) == [0.01, 0.01, 0.1, 0.1]
    assert not any(trials[name].astype(str).str.startswith("{").any() for name in trials)
