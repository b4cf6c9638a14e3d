"""The results tables: their columns, atomic writing, reading.

A table is a folder of Parquet files under ``results/``; most have one file, ``steps`` and
``gpu_samples`` one a training run. The ledger is the record, these are its readable form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import pandas as pd
import pyarrow as pa

from raypipe.errors import ConfigError
from raypipe.storage import parquet
from raypipe.storage.ledger import INTERNAL, Ledger, Row
from raypipe.storage.run_directory import RunDirectory

_TEXT, _INT, _REAL, _TIME = pa.string(), pa.int64(), pa.float64(), pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Column:
    """A column of a results table: its type, the unit of its values, and a line of meaning."""

    name: str
    type: Literal["text", "integer", "real", "boolean", "time"]
    meaning: str
    unit: str = ""


@dataclass(frozen=True)
class Table:
    """The declaration of a results table, at the place that produces it.

    ``row`` says what one row is. A ``partitioned`` table has one file per training run.
    """

    name: str
    row: str
    columns: tuple[Column, ...]
    partitioned: bool = False


#: the columns a table always has, in this order; further ones follow with inferred types
SCHEMAS: Mapping[str, Mapping[str, pa.DataType]] = {
    "stages": {
        "stage": _TEXT,
        "status": _TEXT,
        "started_at": _TIME,
        "duration_s": _REAL,
        "device": _TEXT,
        "gpu_peak_bytes": _INT,
    },
    "trials": {
        "trial_id": _TEXT,
        "stage": _TEXT,
        "status": _TEXT,
        "micro_batch": _INT,
        "accumulation": _INT,
        "effective_batch": _INT,
        "workers": _INT,
        "precision": _TEXT,
        "device": _TEXT,
        "steps": _INT,
        "samples_per_s": _REAL,
        "step_time_s": _REAL,
        "gpu_util_mean": _REAL,
        "gpu_peak_bytes": _INT,
        "energy_j": _REAL,
        "loss_final": _REAL,
        "attempts": _INT,
    },
    "steps": {
        "trial_id": _TEXT,
        "step": _INT,
        "loss": _REAL,
        "lr": _REAL,
        "samples_per_s": _REAL,
    },
    "gpu_samples": {
        "trial_id": _TEXT,
        "gpu_uuid": _TEXT,
        "at": _TIME,
        "util": _REAL,
        "memory_bytes": _INT,
        "power_w": _REAL,
    },
    "evaluations": {
        "dataset": _TEXT,
        "seed": _INT,
        "T": _INT,
        "value": _REAL,
        "duration_s": _REAL,
        "cpu_s": _REAL,
        "started_at": _TIME,
        "worker": _TEXT,
    },
    "studies": {
        "dataset": _TEXT,
        "optimizer": _TEXT,
        "run": _INT,
        "best_T": _INT,
        "best_perplexity": _REAL,
        "evaluations": _INT,
        "unique_evaluations": _INT,
        "duration_s": _REAL,
    },
    "failures": {
        "stage": _TEXT,
        "unit": _TEXT,
        "attempt": _INT,
        "kind": _TEXT,
        "message": _TEXT,
    },
    "environment": {
        "hostname": _TEXT,
        "cpus": _INT,
        "memory_bytes": _INT,
        "gpus": _TEXT,
        "python": _TEXT,
        "torch": _TEXT,
        "ray": _TEXT,
        "raypipe": _TEXT,
        "git_commit": _TEXT,
    },
}

#: written by the training runs themselves, a file each
PARTITIONED = frozenset({"steps", "gpu_samples"})


def write_table(
    run: RunDirectory, table: str, rows: Sequence[Row], run_id: str, partition: str = "data"
) -> None:
    """Replace one file of a table by these rows, atomically."""
    run.write(run.partition(table, partition), parquet.to_bytes(_to_arrow(table, rows, run_id)))


def single_tables(ledger: Ledger) -> list[str]:
    """The tables that are one file: the contract's, and the experiment's own."""
    names = dict.fromkeys([*SCHEMAS, *ledger.tables()])
    return [name for name in names if name not in INTERNAL | PARTITIONED]


def write_tables(run: RunDirectory, ledger: Ledger, tables: Iterable[str], run_id: str) -> None:
    """Write these tables anew from the ledger."""
    for table in tables:
        write_table(run, table, ledger.rows(table), run_id)


def read_partition(run: RunDirectory, table: str, partition: str) -> pd.DataFrame:
    """One file of a table, such as the ``steps`` of a training run.

    Raises:
        ConfigError: it is not readable Parquet.

    """
    return _read_frame(run.partition(table, partition), run)


def read_rows(run: RunDirectory, table: str, partition: str) -> list[Row]:
    """The rows of one file of a table as they were given to write; none where it is missing.

    Raises:
        ConfigError: it is not readable Parquet.

    """
    if not run.exists(run.partition(table, partition)):
        return []
    rows: list[Row] = _read_file(run.partition(table, partition), run).drop(["run_id"]).to_pylist()
    return rows


def read_table(run: RunDirectory, table: str) -> pd.DataFrame:
    """A whole table, all its files; empty, with its columns, where nothing was written yet.

    Raises:
        ConfigError: a file is not readable Parquet.

    """
    parts: list[pd.DataFrame] = []
    for name in run.list(run.table(table)):
        if not name.endswith(".parquet"):
            continue
        parts.append(_read_frame(f"{run.table(table)}/{name}", run))
    parts = [part for part in parts if len(part)] or parts[:1]
    if parts:
        whole: pd.DataFrame = pd.concat(parts, ignore_index=True)
        return whole
    empty: pd.DataFrame = _to_arrow(table, [], "").to_pandas()
    return empty


def read_tables(run: RunDirectory) -> dict[str, pd.DataFrame]:
    """Every table the run directory holds, by name."""
    return {name: read_table(run, name) for name in run.list(run.path("results"))}


def _read_frame(path: str, run: RunDirectory) -> pd.DataFrame:
    table = _read_file(path, run)
    with _reading(path):
        frame: pd.DataFrame = table.to_pandas()
    return frame


def _read_file(path: str, run: RunDirectory) -> pa.Table:
    with _reading(path):
        return parquet.from_bytes(run.read(path))


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # on foreign bytes Arrow raises anything, from KeyError to Unicode's
        advice = "run the configuration again with this run directory: it is written anew"
        if PurePath(path).parent.name in PARTITIONED:
            advice = "what it held is lost, the results are in the other tables"
        raise ConfigError(f"{path} is damaged ({error}); delete it: {advice}") from error


def _to_arrow(table: str, rows: Sequence[Row], run_id: str) -> pa.Table:
    columns: dict[str, pa.DataType | None] = {"run_id": _TEXT, **SCHEMAS.get(table, {})}
    for row in rows:
        columns |= {name: None for name in row if name not in columns}
    arrays = {}
    for name, kind in columns.items():
        values = [run_id if name == "run_id" else row.get(name) for row in rows]
        if kind is not None and pa.types.is_timestamp(kind):
            arrays[name] = _times(values)
            continue
        plain = [_plain(value) for value in values]
        arrays[name] = pa.array(plain, kind) if kind is not None else _inferred(plain)
    return pa.table(arrays)


def _times(values: Sequence[Any]) -> pa.Array:
    """ISO 8601 times, with or without a fraction of a second, as UTC."""
    times = pd.to_datetime(pd.Series(values, dtype=object), utc=True, format="ISO8601")
    return pa.array(times, _TIME)


def _inferred(values: Sequence[Any]) -> pa.Array:
    """Numbers, truth values or text; text where kinds are mixed, numbers where nothing is."""
    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else str(value) for value in values])
    return array.cast(_REAL) if pa.types.is_null(array.type) else array


def _plain(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list | tuple) else value
