"""Reference to a function, ``module:name``: importing it, and the source code behind it."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.pipeline.configuration import import_module
from raypipe.pipeline.source import Source, source_of

_FORM = "must be MODULE:FUNCTION, such as mymodule:score"


def load(reference: str, origin: str) -> Callable[..., Any]:
    """Return the function of a reference.

    Raises:
        ConfigError: the reference has another form, the module cannot be imported, or it has no
            such function.

    """
    module, name = parts(reference, origin)
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
    is_file = module.endswith(".py")
    is_module = all(part.isidentifier() for part in module.split("."))
    if not separator or not name.isidentifier() or not is_module or is_file:
        stem = module.removesuffix(".py").replace("/", ".")
        hint = f"; did you mean {stem}:{name or 'FUNCTION'}?" if is_file else ""
        raise ConfigError(f"{origin}: function = {reference}: {_FORM}{hint}")
    return module, name


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


def source(reference: str, function: Callable[..., Any]) -> Source:
    """Return the source of a function: of its module, or of itself and what it uses."""
    if is_importable(reference):
        return source_of(reference.partition(":")[0])
    return Source({reference: _hash_of(function)})


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"


def _is_own(value: Any, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _hash_of(function: Callable[..., Any]) -> str:
    """Return the hash of a function's code, its defaults, and of the functions that it calls."""
    digest = hashlib.sha256()
    for part in _parts_of(function, set()):
        digest.update(f"{part}\0".encode())
    return digest.hexdigest()[:16]


def _parts_of(function: Any, seen: set[int]) -> Iterator[str]:
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        yield repr((function.args, sorted(function.keywords.items())))
        function = function.func
    code = getattr(function, "__code__", None)
    if id(function) in seen or code is None:
        return
    seen.add(id(function))
    yield from _code_parts(code)
    yield repr((function.__defaults__, function.__kwdefaults__))
    for name, value in sorted(variables(function).items()):
        if inspect.isfunction(value) and not _is_installed(value.__module__):
            yield name
            yield from _parts_of(value, seen)
        elif isinstance(value, str | bytes | int | float | tuple | type(None)):
            yield f"{name} = {value!r}"


def _code_parts(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        else:
            yield repr(constant)


def variables(function: Any) -> dict[str, Any]:
    """Return the global variables and the enclosed ones that a function uses, by name."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    enclosed = zip(code.co_freevars, function.__closure__ or (), strict=True)
    names = set(_names(code))
    found = {name: value for name, value in function.__globals__.items() if name in names}
    return found | {name: cell.cell_contents for name, cell in enclosed}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_installed(module: str) -> bool:
    top = module.partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return False
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    origin = (spec and spec.origin) or ""
    return top in sys.stdlib_module_names or "site-packages" in origin or origin == "frozen"
