"""Results tables: declarations, atomic writing and reading of Parquet.

A table is a folder of Parquet files below ``results/``; most have one file, ``steps`` and
``gpu_samples`` one per training run. Every file of a table has all declared columns. The ledger is
the durable record; the tables derive from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import ConfigError
from raypipe.redaction import encodable
from raypipe.store.artifacts import from_bytes, to_bytes
from raypipe.store.ledger import INTERNAL, Ledger, Row
from raypipe.store.run_directory import BASE, RunDirectory

if TYPE_CHECKING:
    import pandas as pd

#: metadata of Parquet columns, and of files: the declaration of the table and its place among
#: those of the run, so that a run directory can be read without its experiment
_BETTER, _DECLARED = b"better", b"raypipe"
#: rows that are in memory at a time while a table is written
_BATCH = 10_000
#: types of columns: that of Arrow, and those of the values in the ledger
_TYPES: Mapping[str, tuple[pa.DataType, type | UnionType]] = {
    "text": (pa.string(), str),
    "integer": (pa.int64(), int),
    "real": (pa.float64(), int | float),
    "boolean": (pa.bool_(), bool),
    "time": (pa.timestamp("us", tz="UTC"), str),
    "texts": (pa.list_(pa.string()), list),
    "reals": (pa.list_(pa.float64()), list),
}


@dataclass(frozen=True)
class Column:
    """A column of a results table: its type, a line of meaning, and the unit of its values.

    Values of the types ``texts`` and ``reals`` are lists. ``better`` says which values are better,
    if that is what the column measures.
    """

    name: str
    type: Literal["text", "integer", "real", "boolean", "time", "texts", "reals"]
    meaning: str
    unit: str = ""
    better: Literal["lower", "higher", ""] = ""


#: columns that the framework adds to every table
RUN_ID = Column("run_id", "text", "The run; the same for all rows of a run directory.")
VARIANT = Column(
    "variant", "text", "Values of the matrix that it depends on, in `variants`; base if none."
)
COMMAND_ID = Column("command_id", "text", "The command that wrote the row, in `environment`.")
#: names of the columns that raypipe adds to every table
ADDED = (RUN_ID.name, VARIANT.name, COMMAND_ID.name)


@dataclass(frozen=True)
class Table:
    """The declaration of a results table, at the place that produces it.

    Args:
        name: the folder below ``results/``.
        row: a noun phrase for one row, such as ``a stage's outcome``.
        columns: the columns that every file of the table has, whatever its rows.
        partitioned: whether each training run writes a separate file.
        internal: keys of its rows in the ledger that are not columns.
        optional: whether it is written only if it has rows.
        open: whether rows have further columns, which are known once they are written.
        axes: columns whose values the report compares and draws, such as ``method``; without them
            best rows are named by their number.
        groups: columns whose values are not comparable, such as a corpus: each has its best row.
        baselines: values of an axis that are baselines, which the report compares the best row
            with.
        references: values of an axis that are not contenders, such as a method that sees the
            answers; the headline numbers leave them out.
        headline: values of columns that select the rows of the headline numbers, such as
            ``{"level": "all"}``; by default all rows.
        repeats: the key of the setting with the number of repetitions, such as ``lda.runs``.
        shown: columns that the report shows if it has room for some only, or draws by step or time
            of a partitioned table; by default all, or none.
        order: the sort key of its rows; by default they are in the order in which they appeared.

    """

    name: str
    row: str
    columns: tuple[Column, ...] = ()
    partitioned: bool = False
    internal: tuple[str, ...] = ()
    optional: bool = False
    open: bool = False
    axes: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    headline: Mapping[str, str] = field(default_factory=dict, hash=False)
    repeats: str = ""
    shown: tuple[str, ...] = ()
    order: Callable[[Row], Any] | None = field(default=None, compare=False)

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """The columns in their order, with those that the framework adds."""
        return (RUN_ID, VARIANT, *(() if self.partitioned else (COMMAND_ID,)), *self.columns)

    @property
    def meanings(self) -> dict[str, str]:
        """The meaning of each column, with its unit."""
        return {c.name: f"{c.meaning} ({c.unit})" if c.unit else c.meaning for c in self.columns}

    def extended(self, columns: Sequence[Column]) -> Table:
        """Return the table with further columns."""
        known = {column.name for column in self.columns}
        more = (column for column in columns if column.name not in known)
        return replace(self, columns=(*self.columns, *more))


def by_name(tables: Iterable[Table]) -> dict[str, Table]:
    """Return declarations by the names of their tables.

    Raises:
        ValueError: a table is declared twice.

    """
    found: dict[str, Table] = {}
    for table in tables:
        if table.name in found:
            raise ValueError(f"the table {table.name!r} is declared twice; choose another name")
        found[table.name] = table
    return found


def write_table(
    run_dir: RunDirectory,
    table: Table,
    rows: Iterable[Row],
    run_id: str,
    partition: str = "data",
    place: int = 0,
) -> None:
    """Replace one file of a table by these rows, atomically.

    ``place`` is that of the table among those of its run, for :func:`declarations`.

    Raises:
        TypeError: the value of a declared column has another type.

    """
    about = asdict(replace(table, order=None)) | {"place": place}  # order may hold all values
    found = _to_arrow(table, rows, run_id, run_dir.variant)
    found = found.replace_schema_metadata({_DECLARED: json.dumps(about)})
    run_dir.write(run_dir.partition(table.name, partition), to_bytes(found))


def single_tables(ledger: Ledger, declared: Mapping[str, Table]) -> list[Table]:
    """Return the tables that are one file: those declared, and undeclared ones with rows."""
    tables = [
        table
        for table in declared.values()
        if not table.partitioned and (not table.optional or ledger.count(table.name))
    ]
    others = [name for name in ledger.tables() if name not in declared and name not in INTERNAL]
    return [*tables, *(Table(name, "") for name in others)]


def write_tables(
    run_dir: RunDirectory, ledger: Ledger, declared: Mapping[str, Table], run_id: str
) -> None:
    """Write all tables that are one file from the ledger."""
    for place, table in enumerate(single_tables(ledger, declared)):
        rows = (row for _, row in ledger.items(table.name))
        write_table(run_dir, table, rows, run_id, place=place)


def tables_of(
    ledger: Ledger, declared: Mapping[str, Table], run_id: str
) -> dict[str, pd.DataFrame]:
    """Return all tables that are one file as the ledger has them, by name."""
    found = {}
    for table in single_tables(ledger, declared):
        rows = (row for _, row in ledger.items(table.name))
        found[table.name] = _to_arrow(table, rows, run_id, BASE).to_pandas()
    return found


def conform(run_dir: RunDirectory, table: Table) -> None:
    """Give all files of a table the same columns, where a training run wrote undeclared ones."""
    paths = _files(run_dir, table.name)
    schemas = [_schema(path, run_dir) for path in paths]
    if all(schema.equals(schemas[0]) for schema in schemas):
        return
    unified = pa.unify_schemas(schemas, promote_options="permissive")
    for path in paths:
        parts = [unified.empty_table(), _read_file(path, run_dir)]
        whole = pa.concat_tables(parts, promote_options="permissive")
        run_dir.write(path, to_bytes(whole.cast(unified)))


def read_rows(run_dir: RunDirectory, table: str, partition: str) -> list[Row]:
    """Return the rows of one file of a table, without null values; none if it is missing.

    Raises:
        ConfigError: it is damaged.

    """
    if not run_dir.exists(run_dir.partition(table, partition)):
        return []
    rows = _read_file(run_dir.partition(table, partition), run_dir).to_pylist()
    added = (RUN_ID.name, VARIANT.name)
    return [
        {k: value for k, value in row.items() if value is not None and k not in added}
        for row in rows
    ]


def read_table(run_dir: RunDirectory, table: str, partition: str | None = None) -> pd.DataFrame:
    """Return a whole table, or one file of it, such as the ``steps`` of a training run.

    A table that was not written yet is empty.

    Raises:
        ConfigError: a file is damaged.

    """
    arrow = read_arrow(run_dir, table, partition)
    with _reading(run_dir.table(table)):
        frame: pd.DataFrame = arrow.to_pandas()
    return frame


def read_arrow(run_dir: RunDirectory, table: str, partition: str | None = None) -> pa.Table:
    """Return a table as :func:`read_table`, with the types of its columns.

    The metadata of a column has ``better``, where the table declares it.

    Raises:
        ConfigError: a file is damaged.

    """
    paths = [run_dir.partition(table, partition)] if partition else _files(run_dir, table)
    if not paths:
        return pa.table({RUN_ID.name: pa.array([], pa.string())})
    parts = [_read_file(path, run_dir) for path in paths]
    with _reading(paths[0]):
        return pa.concat_tables(parts, promote_options="permissive")


def count_rows(run_dir: RunDirectory, table: str) -> int:
    """Return the number of rows that the files of a table declare.

    Raises:
        ConfigError: a file is damaged.

    """
    count = 0
    for path in _files(run_dir, table):
        with _reading(path), run_dir.fs.open_input_file(path) as file:
            count += pq.read_metadata(file).num_rows
    return count


def declarations(run_dir: RunDirectory) -> list[Table]:
    """Return the tables of a run in the order of their declaration, as their files have it.

    Raises:
        ConfigError: a file is damaged.

    """
    found = []
    for name in run_dir.list(run_dir.path("results")):
        path = next(iter(_files(run_dir, name)), "")
        schema = _schema(path, run_dir) if path else pa.schema([])
        with _reading(path):
            about = json.loads((schema.metadata or {}).get(_DECLARED, b"{}"))
            columns = tuple(Column(**each) for each in about.pop("columns", ()))
            place = int(about.pop("place", 0))
            plain: dict[str, Any] = {"row": "", **about, "name": name, "columns": columns}
            plain = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
            found.append((place, Table(**plain)))
    return [table for _, table in sorted(found, key=lambda pair: pair[0])]


def _schema(path: str, run_dir: RunDirectory) -> pa.Schema:
    with _reading(path), run_dir.fs.open_input_file(path) as file:
        return pq.read_schema(file)


def _files(run_dir: RunDirectory, table: str) -> list[str]:
    """Return the paths of the files of a table."""
    folder = run_dir.table(table)
    return [f"{folder}/{name}" for name in run_dir.list(folder) if name.endswith(".parquet")]


def better(schema: pa.Schema) -> dict[str, str]:
    """Return the columns that measure something, with ``lower`` or ``higher`` each."""
    found = ((field.name, (field.metadata or {}).get(_BETTER)) for field in schema)
    return {name: value.decode() for name, value in found if value in (b"lower", b"higher")}


def read_tables(run_dir: RunDirectory) -> dict[str, pd.DataFrame]:
    """Return every table of a run directory, by name."""
    return {name: read_table(run_dir, name) for name in run_dir.list(run_dir.path("results"))}


def _read_file(path: str, run_dir: RunDirectory) -> pa.Table:
    with _reading(path):
        return from_bytes(run_dir.read(path))


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # on foreign bytes Arrow raises anything, from KeyError to Unicode's
        advice = "run the configuration again with this run directory, which rebuilds it"
        if PurePath(path).name != "data.parquet":
            advice = "delete it: what it held is lost, the results are in the other tables"
        raise ConfigError(f"{path} is damaged ({error}); {advice}") from error


def _to_arrow(table: Table, rows: Iterable[Row], run_id: str, variant: str) -> pa.Table:
    """Return rows as an Arrow table; of many rows there are few in memory at a time."""
    declared = {column.name: column for column in table.all_columns}
    absent = {RUN_ID.name: run_id, VARIANT.name: variant}
    chunks: dict[str, list[pa.Array]] = {name: [] for name in declared}
    undeclared: dict[str, list[Any]] = {}
    names: dict[str, None] = {}
    order: list[Any] = []
    count, left = 0, iter(rows)
    while batch := list(islice(left, _BATCH)):
        for name, column in declared.items():
            values = [row.get(name, absent.get(name)) for row in batch]
            chunks[name].append(_declared(table.name, column, values))
        names |= dict.fromkeys(n for row in batch for n in row if n not in table.internal)
        for name in names.keys() - declared.keys():
            known = undeclared.setdefault(name, [None] * count)
            known += [_plain(row.get(name)) for row in batch]
        order += map(table.order, batch) if table.order is not None else ()
        count += len(batch)
    arrays = {n: pa.chunked_array(c, _TYPES[declared[n].type][0]) for n, c in chunks.items()}
    arrays |= {name: _inferred(undeclared[name]) for name in names if name in undeclared}
    if table.open:  # columns in the order of the rows, after those that the framework adds
        added = [name for name in arrays if name in ADDED]
        arrays = {name: arrays[name] for name in dict.fromkeys([*added, *names, *arrays])}
    better_of = {column.name: {_BETTER: column.better} for column in table.columns if column.better}
    fields = [pa.field(_plain(n), a.type, metadata=better_of.get(n)) for n, a in arrays.items()]
    found = pa.table(list(arrays.values()), schema=pa.schema(fields))
    return found.take(sorted(range(count), key=order.__getitem__)) if order else found


def _declared(table: str, column: Column, values: Sequence[Any]) -> pa.Array:
    """Return the values of a declared column. Raises TypeError."""
    kind, allowed = _TYPES[column.type]
    kinds = {*map(type, values)} - {NoneType}  # a few, of very many values
    wrong = {k for k in kinds if not issubclass(k, allowed) or (k is bool and allowed is not bool)}
    if wrong:
        value = next(value for value in values if type(value) in wrong)
        raise TypeError(
            f"table {table}, column {column.name}: {value!r:.200} is not of the declared type "
            f"{column.type}"
        )
    if column.type == "time":
        values = [datetime.fromisoformat(text) if text else None for text in values]
    if column.type == "text":
        values = [_plain(value) for value in values]
    elif column.type == "texts":
        values = [value and [_plain(text) for text in value] for value in values]
    return pa.array(values, kind)


def _inferred(values: Sequence[Any]) -> pa.Array:
    """Return numbers, truth values or text; text if types are mixed, numbers if all are null."""
    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([None if value is None else str(value) for value in values])
    return array.cast(pa.float64()) if pa.types.is_null(array.type) else array


def _plain(value: Any) -> Any:
    """Return a value that a cell can hold, whatever the ledger has."""
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, sort_keys=True)
    return encodable(value) if isinstance(value, str) else value


def sql(run_dir: RunDirectory, query: str) -> pa.Table:
    """Return the rows of a query over the results tables of a run, which it names as they are.

    Tables are read only if the query mentions them. Like everything in DuckDB's SQL, a query may
    also read and write other files.

    Raises:
        ConfigError: DuckDB is missing, the query is wrong, or a table is damaged.

    """
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(
            "SQL needs DuckDB, which is not installed: pip install 'raypipe-runner[sql]'"
        ) from error
    known = run_dir.list(run_dir.path("results"))
    named = [name for name in known if re.search(rf"\b{re.escape(name)}\b", query, re.IGNORECASE)]
    with duckdb.connect() as connection:
        try:
            for name in named or known:
                connection.register(name, read_arrow(run_dir, name))
            rows = connection.sql(query)
            if rows is not None:
                return rows.to_arrow_table()
        except duckdb.Error as error:
            there = f"tables of this run: {', '.join(known) or 'none'}"
            raise ConfigError(f"SQL: {error}\n{there}") from error
    raise ConfigError("SQL: the query returns no rows; begin it with select")
