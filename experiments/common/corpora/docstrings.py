"""Docstrings of Python's standard library, read from its sources without importing them."""

from __future__ import annotations

import ast
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from experiments.common.corpora.corpus import CorpusError
from raypipe import Cache, fingerprint

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
    """Return the standard library's records, from the user's cache: parsing takes seconds."""
    folder = sysconfig.get_path("stdlib")
    # of everything that decides the content
    key = fingerprint([sys.version, folder, sorted(SKIPPED)])
    with Cache(f"docstrings-{platform.python_version()}") as cache:
        row = cache.get([key]).get(key)
        if row is None:
            row = {"records": [astuple(record) for record in _read(Path(folder))]}
            cache.put({key: row})
    return tuple(DocstringRecord(*record) for record in row["records"])


def _read(folder: Path) -> Iterator[DocstringRecord]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = set(folders) - SKIPPED  # which it then does not enter
        paths = [Path(parent, name) for name in files if name.endswith(".py")]
        found += [(_module_name(path.relative_to(folder)), path) for path in paths]
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


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
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
