"""Docstrings of Python's standard library, read from its sources without importing them."""

from __future__ import annotations

import ast
import gzip
import json
import logging
import platform
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal

from experiments.common.corpora.corpus import CorpusError
from raypipe.store.run_directory import RunDirectory, cache_directory

logger = logging.getLogger(__name__)

#: Excluded: tests, programs, installed packages, generated tables (character maps of ``encodings``)
SKIPPED = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)

Kind = Literal["module", "class", "function"]


@dataclass(frozen=True)
class DocstringRecord:
    """One docstring.

    Attributes:
        module: dotted name of the module; its first part is the package, the coarse class of
            a two-level hierarchy.
        qualname: dotted name inside the module, empty for the module itself.
        kind: what is documented; methods are functions.
        text: the docstring without its indentation.

    """

    module: str
    qualname: str
    kind: Kind
    text: str

    @property
    def package(self) -> str:
        """The top-level package or module."""
        return self.module.partition(".")[0]

    @property
    def summary(self) -> str:
        """The first line, by PEP 257 a summary of the rest."""
        return self.text.partition("\n")[0]


def docstring_records(root: Path | None = None) -> Iterator[DocstringRecord]:
    """Return every non-empty docstring below ``root``, by default the standard library.

    The order is fixed: by module name, then by position in the source.

    Raises:
        CorpusError: there are no Python sources, or one does not parse.

    """
    return _read(root) if root is not None else iter(_standard_library())


@lru_cache(maxsize=1)
def _standard_library() -> tuple[DocstringRecord, ...]:
    """Return the standard library's records, from the user's cache: parsing takes seconds.

    A damaged entry is rebuilt; a cache that cannot be written only costs time.
    """
    path = _cache_path()
    try:
        return read_cached(path)
    except FileNotFoundError:
        pass
    except (CorpusError, OSError) as error:
        logger.warning("%s; the built-in docstrings are read again", error)
    records = tuple(_read(Path(sysconfig.get_path("stdlib"))))
    try:
        write_cached(path, records)
    except OSError as error:
        logger.warning("%s: the built-in docstrings cannot be cached: %s", path, error)
    return records


def read_cached(path: Path) -> tuple[DocstringRecord, ...]:
    """Return the records that :func:`write_cached` wrote.

    Raises:
        OSError: the file cannot be read, or does not exist.
        CorpusError: it is damaged.

    """
    try:
        with gzip.open(path) as file:  # with a checksum
            return tuple(DocstringRecord(*record) for record in json.load(file))
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, TypeError) as error:
        raise CorpusError(f"{path}: damaged: {error}") from error


def write_cached(path: Path, records: Sequence[DocstringRecord]) -> None:
    """Write records atomically.

    Raises:
        OSError: the folder cannot be written.

    """
    content = gzip.compress(json.dumps([*map(astuple, records)]).encode("ascii"), 1)
    RunDirectory(str(path.parent)).write(str(path), content)


def _cache_path() -> Path:
    """Return the path of the cache entry, named by everything that decides its content."""
    text = json.dumps([sys.version, sysconfig.get_path("stdlib"), sorted(SKIPPED)])
    key = sha256(text.encode()).hexdigest()[:16]
    return cache_directory() / f"docstrings-{platform.python_version()}-{key}.json.gz"


def _read(folder: Path) -> Iterator[DocstringRecord]:
    found = [
        (_module_name(path.relative_to(folder)), path)
        for path in folder.rglob("*.py")
        if SKIPPED.isdisjoint(path.relative_to(folder).parts)
    ]
    if not found:
        raise CorpusError(f"{folder}: no Python sources; install Python with its standard library")
    for module, path in sorted(found):
        try:
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except (OSError, SyntaxError, ValueError) as error:
            raise CorpusError(f"{path}: not a readable Python source: {error}") from error
        yield from _records(tree, module, "", "module")


def _records(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    module: str,
    qualname: str,
    kind: Kind,
) -> Iterator[DocstringRecord]:
    """Yield the docstring of a definition, then those of the definitions inside."""
    text = ast.get_docstring(node)
    if text:
        yield DocstringRecord(module, qualname, kind, text)
    for inner in _definitions(node):
        name = f"{qualname}.{inner.name}" if qualname else inner.name
        yield from _records(
            inner, module, name, "class" if isinstance(inner, ast.ClassDef) else "function"
        )


def _definitions(
    node: ast.AST,
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the definitions directly inside, also under ``if``, ``try``, ``with`` and ``match``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _definitions(child)


def _module_name(path: Path) -> str:
    """Return the dotted name of a file: ``xml/dom/__init__.py`` -> ``xml.dom``."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
