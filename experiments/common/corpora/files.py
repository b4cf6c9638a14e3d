"""Data files: search, opening and parsing into Arrow tables, with errors that name the file."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from experiments.common.corpora.corpus import CorpusError
from raypipe import artifacts

#: bytes of CSV parsed at a time, which is also the maximum length of a row
_BLOCK = 2**26


def find_file(directory: Path, name: str, forms: Sequence[tuple[str, str]]) -> Path:
    """Return the first existing ``directory/<prefix><name><suffix>`` of several forms.

    Args:
        directory: the folder to search.
        name: the corpus.
        forms: pairs of prefix and suffix, the preferred one first.

    Raises:
        CorpusError: the folder or file does not exist (the message lists the folder's corpora and
            the nearest one), or the name points outside of the folder.

    """
    check_name(name)
    if not directory.is_dir():
        raise CorpusError(f"{directory}: no such folder; set data.dir to the folder of the corpora")
    for prefix, suffix in forms:
        path = directory / f"{prefix}{name}{suffix}"
        if name and path.is_file():
            return path
    sought = " or ".join(f"{prefix}{name}{suffix}" for prefix, suffix in forms)
    names = sorted(
        {
            path.name.removeprefix(prefix).removesuffix(suffix)
            for prefix, suffix in forms
            for path in directory.glob(f"{prefix}*{suffix}")
        }
    )
    raise CorpusError(f"{directory}: there is no {sought}; {_offer(name, names, 'corpora')}")


def check_name(name: str) -> None:
    """Reject a corpus name that is a path. Raises CorpusError."""
    if "/" in name or name in (".", "..") or not name.isprintable():
        raise CorpusError(
            f"{name!r} is a path, not the name of a corpus; set data.dir to the folder it lies in"
        )


def check_known(what: str, name: str, known: Sequence[str], source: str) -> None:
    """Reject a name that is not among the known ones.

    Raises:
        CorpusError: the name is unknown; the message lists the known names and the nearest.

    """
    if name not in known:
        raise CorpusError(f"{source}: there is no {what} {name!r}; {_offer(name, known, what)}")


@contextmanager
def reading(path: Path, form: str) -> Iterator[None]:
    """Convert any error of a parser in the body into a :class:`CorpusError` that names the file."""
    try:
        yield
    except CorpusError:
        raise
    except Exception as error:  # parsers raise anything on invalid bytes
        raise CorpusError(
            f"{path}: cannot be read as {form}: {type(error).__name__}: {error}; "
            "the file is damaged, incomplete or of another format: copy it again"
        ) from error


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file, plain or ``.gz`` by its suffix, and skip a BOM.

    The codec ``utf-8-sig`` is not used: it takes a partial BOM for the end of the file.
    """
    packed = path.suffix == ".gz"
    with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as file:
        if file.read(1) != "\ufeff":
            file.seek(0)
        yield file


def json_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file, plain or ``.gz``, one per line, each with its place.

    Raises:
        CorpusError: the file is damaged, or a line is not an object or has half a surrogate pair.

    """
    with reading(path, "JSONL, an object a line"), open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                record = json.loads(line)
                if "\\ud" in line.lower():
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise CorpusError(f"{place}: half of a surrogate pair is not text") from error
            except ValueError as error:
                raise CorpusError(f"{place}: not JSON: {error}; give an object a line") from error
            if not isinstance(record, dict):
                raise CorpusError(f"{place}: expected an object, got {type(record).__name__}")
            yield place, record


def checksum(path: Path, key: str) -> str:
    """Return the SHA-256 of the file that ``key`` names. Raises CorpusError if it is missing."""
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such file; see {key}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(settings: Any, sources: Sequence[str], *keys: str) -> None:
    """Reject files that the source does not read, and a source of files without the first of them.

    Args:
        settings: a section with the key ``source``.
        sources: the sources that read files.
        keys: the section's keys of files; the first one is required.

    Raises:
        ValueError: the source and the files do not fit together.

    """
    given = {key: getattr(settings, key) for key in keys}
    missing = settings.source in sources and not given[keys[0]]
    if missing or (settings.source not in sources and any(given.values())):
        listed = ", ".join(f"{key} = {_listed(value)}" for key, value in given.items())
        raise ValueError(
            f"source = {settings.source} with {listed}: only source = {' or '.join(sources)} "
            f"reads files, and it needs {keys[0]}"
        )


def _listed(files: Any) -> str:
    return (", ".join(map(str, files)) if isinstance(files, tuple) else str(files or "")) or "none"


def read_rows(path: Path, texts: Sequence[str] = (), others: Sequence[str] = ()) -> pa.Table:
    """Return the rows of a ``.parquet``, ``.csv`` or ``.jsonl`` file, the latter two also ``.gz``.

    In CSV, an empty field or an unquoted ``NA`` is a missing value.

    Args:
        path: the file.
        texts: columns of text that the file must have. If given, only these and ``others`` are
            read, CSV fields as the text that they are, and the texts are returned as
            ``large_string``.
        others: further columns to read if the file has them.

    Raises:
        CorpusError: the suffix is unknown, the file is damaged or has no row, two columns have
            the same name, or a column of ``texts`` is missing or does not hold text.

    """
    name = path.name.removesuffix(".gz")
    with reading(path, "a table"):
        if path.name.endswith(".parquet"):
            with pq.ParquetFile(path) as file:  # read_table would look up columns by name
                table = artifacts.read(file)
        elif name.endswith(".csv"):
            table = _csv(path, verbatim=bool(texts))
        elif name.endswith(".jsonl"):
            table = _jsonl(path, texts, others)
        else:
            raise CorpusError(
                f"{path}: unknown suffix; a table is .parquet, .csv or .jsonl, the latter two also "
                "with .gz"
            )
        table.validate(full=True)  # Arrow does not verify that text is UTF-8
    repeated = [name for name, count in Counter(table.column_names).items() if count > 1]
    if repeated:
        raise CorpusError(f"{path}: several columns are called {repeated[0]!r}; rename them")
    if not len(table):
        raise CorpusError(f"{path}: there is no row")
    if not texts:
        return table
    further = [column for column in others if column in table.column_names]
    chosen = {column: text_column(table, column, path) for column in texts}
    return pa.table({**{column: table[column] for column in further}, **chosen})


def _csv(path: Path, *, verbatim: bool) -> pa.Table:
    """Return the rows of a CSV file; ``verbatim`` as text, without conversion."""
    reads = pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK)
    parses = pa.csv.ParseOptions(newlines_in_values=True)
    if not verbatim:
        converts = pa.csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
        return pa.csv.read_csv(path, reads, parses, converts)
    with pa.csv.open_csv(path, reads, parses) as reader:
        names = reader.schema.names
    converts = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.large_string()))
    return pa.csv.read_csv(path, reads, parses, converts)


def _jsonl(path: Path, texts: Sequence[str], others: Sequence[str]) -> pa.Table:
    """Return the rows of a JSONL file; with ``texts``, only these columns and ``others``."""
    records = []
    for place, record in json_objects(path):
        for name in texts:
            check_known("column", name, list(record), place)
            if not isinstance(record[name], str | None):
                kind = type(record[name]).__name__
                raise CorpusError(f"{place}: column {name!r} holds {kind}, not text; name another")
        records.append(record)
    names = dict.fromkeys(name for record in records for name in record)
    wanted = [name for name in names if not texts or name in (*texts, *others)]
    return pa.table({name: [record.get(name) for record in records] for name in wanted})


def text_column(rows: pa.Table, name: str, path: Path) -> pa.ChunkedArray:
    """Return a column as ``large_string``. Raises CorpusError if it is missing or not text."""
    check_known("column", name, rows.column_names, str(path))
    kind = rows[name].type
    if not (is_text(kind) or pa.types.is_null(kind)):
        raise CorpusError(f"{path}: column {name!r} holds {kind}, not text; name another one")
    return rows[name].cast(pa.large_string())


def is_text(kind: pa.DataType) -> bool:
    """Whether values of the type are text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def _offer(name: str, known: Sequence[str], what: str) -> str:
    """Return the names that exist instead, and the nearest one."""
    if not known:
        return f"no {what} found at all"
    nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"there are: {', '.join(known)}; the nearest is {nearest!r}"
