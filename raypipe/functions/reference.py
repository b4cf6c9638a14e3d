"""Reference to a function, ``module:name``: importing it, and the source code behind it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

from raypipe.config import search_path
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.functions.used import Used
from raypipe.graph.configuration import import_module
from raypipe.graph.source import SourceCode, current_source, source_of

_FORM = "must be MODULE:FUNCTION, such as mymodule:score"


def load(reference: str, origin: str) -> Callable[..., Any]:
    """Return the function of a reference.

    Raises:
        ConfigError: the reference has another form, the module cannot be imported, or it has no
            such function.

    """
    module, name = parts(reference, origin)
    search_path.prefer()
    with suppress(ImportError, ValueError):
        current_source(module)  # the function is what its file holds now
    loaded = import_module(module, origin, "function")
    function = getattr(loaded, name, None)
    if function is None:
        names = [key for key, value in vars(loaded).items() if _is_own(value, loaded)]
        listed = f" (it has: {', '.join(names)})" if names else ""
        raise ConfigError(
            f"{origin}: function = {reference}: the module {module} has no function {name}"
            f"{did_you_mean(name, names)}{listed}"
        )
    check(function, reference, origin)
    return function  # type: ignore[no-any-return]


def parts(reference: str, origin: str) -> tuple[str, str]:
    """Return module and name of a reference. Raises ConfigError."""
    module, separator, name = reference.partition(":")
    is_module = all(part.isidentifier() for part in module.split("."))
    if not separator or not name.isidentifier() or not is_module or module.endswith(".py"):
        raise ConfigError(
            f"{origin}: function = {reference}: {_FORM}{_hint(module, name or 'FUNCTION')}"
        )
    return module, name


def _hint(path: str, name: str) -> str:
    """Return what to write in place of a file; empty for what is no file."""
    if not path.endswith(".py") and "/" not in path:
        return ""
    file = Path(os.path.relpath(path.removesuffix(".py")))
    if all(part.isidentifier() for part in file.parts):
        return f"; did you mean {'.'.join(file.parts)}:{name}?"
    if file.name.isidentifier():
        return f"; change to the folder {file.parent}, and give {file.name}:{name}"
    return f"; {file.name} is not a name that Python can import: rename the file"


def check(function: Any, reference: str, origin: str) -> None:
    """Raise ConfigError for what cannot be called with keyword arguments and return values."""
    where = f"{origin}: function = {reference}"
    if not callable(function):
        raise ConfigError(f"{where}: is of type {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: is async; give a plain function that returns its result")
    if inspect.isgeneratorfunction(function):
        raise ConfigError(f"{where}: yields; give a function that returns one mapping per call")


def of_function(function: Callable[..., Any]) -> str:
    """Return the reference of a function object; ``__main__`` if its module is not importable.

    A function of a script, a notebook, or another function is found by no other process.
    """
    module, name = getattr(function, "__module__", None), _name(function)
    loaded = sys.modules.get(module or "")
    if loaded is not None and module != "__main__" and getattr(loaded, name, None) is function:
        return f"{module}:{name}"
    return f"__main__:{name}"


def is_importable(reference: str) -> bool:
    """Whether other processes can import the function."""
    return not reference.startswith("__main__:")


def source(reference: str, function: Callable[..., Any]) -> SourceCode:
    """Return the source of a function: of its module, or of itself and what it uses."""
    if is_importable(reference):
        return source_of(reference.partition(":")[0])
    used = Used()
    used.add(function)
    found, files = used.source(), dict[str, bytes]()
    with suppress(OSError, TypeError):  # typed into an interpreter
        files["__main__.py"] = dedent(inspect.getsource(inspect.unwrap(function))).encode()
    return SourceCode({**found.modules, reference: used.digest}, {**found.files, **files})


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"


def _is_own(value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__
