from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs as arrow_fs

from raypipe.errors import ConfigError
from raypipe.store.artifacts import read_arrow, read_parquet, write_arrow, write_parquet
from raypipe.store.run_directory import RunDirectory

TABLE = pa.table({"tokens": [[1, 2], [], [3]], "target": [0, 1, 0]})


@pytest.fixture(params=["local", "remote"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    if request.param == "local":
        return RunDirectory.at(tmp_path)
    found = RunDirectory("bucket://run")
    filesystem = arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem())
    found.__dict__["_opened"] = (filesystem, "remote")
    return found


@pytest.mark.parametrize(
    ("write", "read"), [(write_arrow, read_arrow), (write_parquet, read_parquet)]
)
def test_what_is_read_is_what_was_written(run: RunDirectory, write, read) -> None:
    path = run.artifact("stage", "table")
    write(run, path, TABLE)
    assert read(run, path).equals(TABLE)
    with pytest.raises((OSError, ConfigError)):
        read(run, run.artifact("stage", "nothing"))


@pytest.mark.parametrize("cut", [0, 8, 100, -20])
def test_a_damaged_table_is_noticed(run: RunDirectory, cut: int) -> None:
    for write, read, error in (
        (write_arrow, read_arrow, ValueError),
        (write_parquet, read_parquet, ConfigError),
    ):
        path = run.artifact("stage", "table")
        write(run, path, TABLE)
        run.write(path, run.read(path)[:cut])
        with pytest.raises(error):
            read(run, path)
