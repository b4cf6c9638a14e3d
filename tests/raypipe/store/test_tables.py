from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.pabbo_lda.experiment import EXPERIMENT
from raypipe.commands.configuration import declared
from raypipe.errors import ConfigError
from raypipe.store import tables
from raypipe.store.artifacts import read_arrow, read_parquet, write_arrow, write_parquet
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Column, Table, conform, read_table, read_tables, write_table
from tests.raypipe.examples.sweeping import sweep
from tests.scenario import cases

TABLES = declared(EXPERIMENT)

CONTRACT = cases(__file__, "contract")


def frames(run: RunDirectory, table: str) -> list[pd.DataFrame]:
    """The table as pandas, polars and DuckDB read it, and as raypipe does."""
    files = f"{run.table(table)}/*.parquet"
    return [
        pd.read_parquet(run.table(table)),
        pl.read_parquet(files).to_pandas(),
        duckdb.read_parquet(files).df(),
        read_table(run, table),
    ]


@pytest.mark.parametrize("table", CONTRACT)
@pytest.mark.parametrize("rows", [[], [{"more": 1}]])
def test_the_columns_of_the_contract_are_there_in_every_reader(run, table, rows):
    write_table(run, TABLES[table], rows, "run-1")
    for frame in frames(run, table):
        assert {"run_id", *CONTRACT[table].split(", ")} <= set(frame.columns)
        assert ("more" in frame) == bool(rows)
        assert len(frame) == len(rows)


def test_every_declaration_says_what_its_rows_and_columns_are():
    for table in TABLES.values():
        assert table.row, table.name
        names = [column.name for column in table.all_columns]
        assert len(names) == len(set(names)), table.name
        for column in table.all_columns:
            assert column.meaning.endswith("."), f"{table.name}.{column.name}"


@pytest.mark.parametrize(
    ("column", "value"),
    [("best_T", "5"), ("best_T", 5.5), ("best_T", True), ("optimizer", 3), ("duration_s", "1")],
)
def test_a_value_of_another_type_than_declared_is_an_error(run, column, value):
    with pytest.raises(TypeError, match=f"table studies, column {column}: .* declared type"):
        write_table(run, TABLES["studies"], [{column: value}], "run-1")
    assert read_tables(run) == {}


@pytest.mark.parametrize("batch", [1, 10_000])
def test_values_arrive_as_they_are_in_every_reader(run, monkeypatch, batch):
    monkeypatch.setattr(tables, "_BATCH", batch)
    rows = cases(__file__, "values")
    rows[2]["spec"] = (1, 2)
    write_table(run, TABLES["evaluations"], rows, "run-1")
    specs = [json.dumps({"a": [1], "b": 1}), None, "[1, 2]", json.dumps({"x": math.inf})]
    for frame in frames(run, "evaluations"):
        assert list(frame["run_id"]) == ["run-1"] * 4
        values = frame["value"].to_numpy(float)
        np.testing.assert_array_equal(values, [1e44, -math.inf, math.nan, 0.1])
        assert [None if pd.isna(s) else s for s in frame["spec"]] == specs
        names = [None if pd.isna(s) else s for s in frame["dataset"]]
        assert names == ["bücher", None, 'a "b"\n', r"half \udcff"]
        assert list(frame["own"])[:2] == [1.0, 2.5]
        assert list(frame["mixed"].fillna("-")) == ["3", "auto", "[1]", "-"]
        assert list(frame["huge"].fillna("-")) == [str(2**64), "-", "-", "-"]
        assert frame["nothing"].isna().all()
        assert frame["duration_s"][3] == 3.0
    exact = pq.read_table(run.partition("evaluations"))
    assert exact["seed"].to_pylist() == [2**62, 0, None, None]


def test_times_with_and_without_a_fraction_of_a_second(run):
    # without a fraction is what isoformat() gives once in a million
    times = ["2025-01-02T03:04:05.000006+00:00", "2025-01-02T03:04:05+00:00", None]
    write_table(run, TABLES["stages"], [{"started_at": time} for time in times], "run-1")
    found = pq.read_table(run.partition("stages"))["started_at"].to_pylist()
    second = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert found == [second.replace(microsecond=6), second, None]


def test_a_declaration_is_read_as_it_was_written_or_has_no_columns(run):
    columns = Column("method", "text", "Who."), Column("f1", "real", "F1.", "%", better="higher")
    table = Table("t", "a row", columns, axes=("method",), headline={"level": "all"}, open=True,
                  baselines=(0,), order=str)  # fmt: skip
    write_table(run, table, [{"method": "a", "f1": 1.0}], "r", place=3)
    assert tables.declarations(run) == [table]
    bare = pq.read_table(run.partition("t")).replace_schema_metadata(None)
    pq.write_table(bare, run.partition("t"))
    assert tables.declarations(run) == [Table("t", "")]


def test_the_files_of_a_table_are_read_as_one(run):
    """Also with columns that nobody declared, which are in each of them."""
    accuracy = Column("accuracy", "real", "Fraction of right answers.")
    steps = TABLES["steps"].extended([accuracy])
    write_table(run, steps, [{"trial_id": "a/b", "step": 1, "loss": 0.5}], "r", "a/b")
    write_table(run, steps, [{"step": 1, "accuracy": 0.9, "eval_x": 0.5}], "r", "c")
    write_table(run, steps, [{"step": 2, "eval_y": "text"}], "r", "d")
    write_table(run, steps, [], "r", "empty")
    assert run.list(run.table("steps")) == [f"{x}.parquet" for x in ("a-b", "c", "d", "empty")]
    conform(run, steps)
    own = {column.name for column in steps.columns}
    for frame in frames(run, "steps"):
        assert {"run_id", "variant", "eval_x", "eval_y"} | own == set(frame.columns)
        assert list(frame["step"]) == [1, 1, 2]
        assert (frame["accuracy"].sum(), frame["eval_x"].sum()) == (0.9, 0.5)
    schemas = {pq.read_schema(file) for file in Path(run.table("steps")).iterdir()}
    assert len(schemas) == 1


def test_a_damaged_file_is_named_with_what_to_do(run):
    """Damage anywhere in a file: tests/fuzz."""
    write_table(run, TABLES["failures"], [{"unit": "a", "message": "no"}], "run-1")
    path = Path(run.partition("failures"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"data\.parquet is damaged .* rebuilds it"):
        read_table(run, "failures")
    for name in ("a", "x"):
        run.write(run.partition("steps", name), b"")
        with pytest.raises(ConfigError, match=rf"{name}\.parquet is damaged .*; delete it: "):
            read_table(run, "steps", name)


ARTIFACT = pa.table({"tokens": [[1, 2], [], [3]], "target": [0, 1, 0]})


@pytest.mark.parametrize(
    ("write", "read", "error"),
    [(write_arrow, read_arrow, ValueError), (write_parquet, read_parquet, ConfigError)],
)
def test_a_table_is_read_as_it_was_written_or_not_at_all(anywhere, write, read, error):
    path = anywhere.artifact("stage", "table")
    with pytest.raises((OSError, ConfigError)):
        read(anywhere, path)
    write(anywhere, path, ARTIFACT)
    assert read(anywhere, path).equals(ARTIFACT)
    content = anywhere.read(path)
    for cut in (0, 8, 100, -20):
        anywhere.write(path, content[:cut])
        with pytest.raises(error):
            read(anywhere, path)


# tables of different runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that evaluates, a sweep, and a run that failed and has empty tables."""
    folder = tmp_path_factory.mktemp("runs")
    text = Path(__file__).with_name("swept.yaml").read_text()
    assert sweep(text, folder / "a", ("sweep=null",)) is None
    assert sweep(text, folder / "b") is None
    assert sweep(text, folder / "c", ("sweep=null", "fail=true")) is not None
    return folder


@pytest.mark.parametrize("table", ["stages", "trials", "steps", "failures"])
def test_a_table_of_several_runs_is_read_as_one(runs, table):
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
    texts = frames[0].astype(str)
    assert not texts.apply(lambda column: column.str.startswith("{")).any(axis=None)
