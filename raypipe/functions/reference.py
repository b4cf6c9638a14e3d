"""Reference to a function, ``module:name``: its import, its arguments, and its source code."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from types import CodeType, ModuleType
from typing import Any

from raypipe import import_path
from raypipe.config.axes import values_of
from raypipe.config.validation import did_you_mean, near_and_all
from raypipe.errors import ConfigError, package_of
from raypipe.graph.configuration import import_module
from raypipe.graph.source import SourceCode, current_source, source_of

#: calls of one experiment
_MOST_CALLS = 1_000_000
_FORM = "must be MODULE:FUNCTION, such as mymodule:score"

#: types whose text is their value
_PLAIN = (*(str, bytes, bytearray, bool, int, float, complex), type(None), type(...), range, slice)
#: modules of a user that have no file
_NO_FILES = ("__main__", "__mp_main__")
#: modules whose objects have a state that is not a value: what was drawn or read before
_STATES = ("random", "_random", "itertools", "io", "_io")
#: entries of a class that say nothing of its behavior
_NOT_CODE = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"),
        *("__firstlineno__", "__static_attributes__"),
    }
)


def load(reference: str, origin: str) -> Callable[..., Any]:
    """Return the function of a reference.

    Raises:
        ConfigError: the reference has another form, the module cannot be imported, or it has no
            such function.

    """
    module, name = parts(reference, origin)
    import_path.prefer()
    with suppress(ImportError, ValueError):
        current_source(module)  # the function is what its file holds now
    loaded = import_module(module, origin, "function")
    function = getattr(loaded, name, None)
    if function is None:
        own = {key: value for key, value in vars(loaded).items() if inspect.isfunction(value)}
        names = [key for key, value in own.items() if value.__module__ == module]
        raise ConfigError(
            f"{origin}: function = {reference}: the module {module} has no function {name}"
            f"{near_and_all(name, names)}"
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
    """Return what to write in place of a file; empty for what is not a file."""
    if not path.endswith(".py") and "/" not in path:
        return ""
    file = Path(os.path.relpath(path.removesuffix(".py")))
    if all(part.isidentifier() for part in file.parts):
        return f"; did you mean {'.'.join(file.parts)}:{name}?"
    return "; Python imports only files below the current folder whose names are identifiers"


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
    used = CodeHash(function)
    found, files = used.source(), dict[str, bytes]()
    with suppress(OSError, TypeError):  # typed into an interpreter
        files["__main__.py"] = dedent(inspect.getsource(inspect.unwrap(function))).encode()
    return SourceCode({**found.modules, reference: used.digest}, {**found.files, **files})


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"


def calls(arguments: Mapping[str, Any]) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """Return the number of calls, and what returns the arguments of each; the last one is fastest.

    Raises:
        ValueError: there are more than a million calls.

    """
    lists = [values_of(value) or [value] for value in arguments.values()]
    if (number := math.prod(map(len, lists))) > _MOST_CALLS:
        raise ValueError(f"arguments: {number:,} calls; at most {_MOST_CALLS:,} are possible")

    def of_call(place: int) -> dict[str, Any]:
        found = list[Any]()
        for values in reversed(lists):
            place, which = divmod(place, len(values))
            found.append(values[which])
        return dict(zip(arguments, reversed(found), strict=True))

    return number, of_call


def check_signature(
    function: Callable[..., Any], names: Sequence[str], where: str, reserved: Sequence[str]
) -> None:
    """Check that a function accepts arguments with these names, and needs no others.

    Raises:
        ConfigError: an argument that it does not have, lacks, or that has the name of a column.

    """
    for name in names:
        if name in reserved:
            raise ConfigError(
                f"{where}: the argument {name!r} has the name of a column that raypipe writes; "
                "rename it in the function"
            )
    signature, accepted = _signature(function), keywords(function)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        parameters = signature.parameters
        problem, unknown = str(error), [each for each in names if each not in parameters]
        if any(each.kind is each.POSITIONAL_ONLY for each in parameters.values()):
            problem = "arguments are given by name, so remove the `/` from its signature"
        elif unknown and accepted is not None:
            hint = did_you_mean(unknown[0], accepted)
            problem = f"the function has no argument {unknown[0]!r}{hint}"
        raise ConfigError(
            f"{where}: {problem} (its arguments: {', '.join(accepted or ()) or 'none'}; give each "
            "as NAME=VALUE or NAME=[VALUE,...])"
        ) from None


def override_of(text: str, function: Callable[..., Any], settings: Container[str]) -> str:
    """Return an override ``name=value`` as one of a key: of an argument, unless a setting has it.

    An argument of the function comes before a setting of the same name.
    """
    first = text.partition("=")[0].partition(".")[0]
    if first in settings and first not in (keywords(function) or ()):
        return text
    return f"arguments.{text}"


def keywords(function: Callable[..., Any]) -> list[str] | None:
    """Return the arguments that a function accepts by name; None if it accepts any name."""
    parameters = _signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return [e.name for e in parameters if e.kind in (e.POSITIONAL_OR_KEYWORD, e.KEYWORD_ONLY)]


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # written in C: the call itself will tell
        return inspect.signature(lambda **_: None)


class CodeHash:
    """Hash over a function and everything that it uses, and the user's modules among that.

    It covers what pickle would store, with the code of the user's functions and classes in place of
    their names. Of objects whose state is not a value, such as loggers, and of those that pickle
    refuses, the type alone counts. Nothing depends on addresses, or on the order of sets. Installed
    packages count by their names.
    """

    def __init__(self, value: Any) -> None:
        self._seen: dict[int, Any] = {}
        self._modules: set[str] = set()
        text = repr(self._tree(value)).encode(errors="surrogatepass")
        self.digest = hashlib.sha256(text).hexdigest()[:16]

    def source(self) -> SourceCode:
        """Return the source of the user's modules, and of those that they import."""
        modules, files = dict[str, str](), dict[str, bytes]()
        for name in sorted(self._modules):
            with suppress(ImportError, ValueError):  # made in memory
                found = source_of(name)
                modules |= found.modules
                files |= found.files
        return SourceCode(modules, files)

    def _tree(self, value: Any) -> Any:
        """Return a value as nested lists of plain values."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._seen:
            return ("again",)
        self._seen[id(value)] = value  # kept alive: the address is not used again
        return [self._tree(part) for part in self._parts(value)]

    def _parts(self, value: Any) -> Iterable[Any]:
        """Return what decides a value: its kind, and the values that it holds or uses."""
        kind = type(value)
        if kind in (list, tuple):
            return (kind.__name__, *value)
        if isinstance(value, dict):
            return (kind.__name__, *value.keys(), *value.values())
        if isinstance(value, Set):
            return ("set", *sorted(CodeHash(each).digest for each in value))
        if isinstance(value, ModuleType):
            self._is_users(value.__name__)
            return "module", value.__name__
        if isinstance(value, CodeType):
            return "code", value.co_code, value.co_names, value.co_varnames, *value.co_consts
        function = inspect.unwrap(value) if callable(value) else value  # also of lru_cache
        if isinstance(value, type) or inspect.isfunction(function):
            name = kind.__name__, function.__module__, function.__qualname__
            if not self._is_users(function.__module__):
                return name
            if isinstance(value, type):
                own = {k: v for k, v in sorted(vars(value).items()) if k not in _NOT_CODE}
                return *name, value.__bases__, own
            used = dict(sorted(variables(function).items()))
            code = function.__code__, function.__defaults__, function.__kwdefaults__
            return "function", *code, used
        if isinstance(value, property | classmethod | staticmethod):
            functions = (getattr(value, name, None) for name in ("__func__", "fget", "fset"))
            return (kind.__name__, *functions)
        module, reduced = kind.__module__, None
        if module.partition(".")[0] not in _STATES and not module.startswith("numpy.random"):
            with suppress(Exception):  # it cannot be pickled
                reduced = value.__reduce_ex__(4)
        if reduced is None or isinstance(reduced, str):  # the name of a global object
            return "object", kind, getattr(value, "__module__", None), reduced
        return "object", kind, *(list(x) if isinstance(x, Iterator) else x for x in reduced)

    def _is_users(self, module: str | None) -> bool:
        """Whether a module is the user's, which is noted if there is a file of it."""
        if module is None or module in _NO_FILES:
            return True
        file = getattr(sys.modules.get(module), "__file__", None)
        if (
            module.partition(".")[0] in sys.stdlib_module_names
            or package_of(file or "") is not None
        ):
            return False
        self._modules.add(module)
        return True


def variables(function: Any) -> dict[str, Any]:
    """Return the global variables and the enclosed ones that a function uses, by name."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    names = set(_names(code))
    found = {name: value for name, value in function.__globals__.items() if name in names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # assigned later
            found[name] = cell.cell_contents
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
