from __future__ import annotations

import pyarrow as pa
import pytest

from raypipe.errors import ConfigError
from raypipe.store.artifacts import read_arrow, read_parquet, write_arrow, write_parquet
from raypipe.store.run_directory import RunDirectory

TABLE = pa.table({"tokens": [[1, 2], [], [3]], "target": [0, 1, 0]})


@pytest.mark.parametrize(
    ("write", "read", "error"),
    [(write_arrow, read_arrow, ValueError), (write_parquet, read_parquet, ConfigError)],
)
def test_a_table_is_read_as_it_was_written_or_not_at_all(
    anywhere: RunDirectory, write, read, error
) -> None:
    path = anywhere.artifact("stage", "table")
    with pytest.raises((OSError, ConfigError)):
        read(anywhere, path)
    write(anywhere, path, TABLE)
    assert read(anywhere, path).equals(TABLE)
    content = anywhere.read(path)
    for cut in (0, 8, 100, -20):
        anywhere.write(path, content[:cut])
        with pytest.raises(error):
            read(anywhere, path)
