"""Hash of the code of a function that no module holds, and of all that it uses."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any

from raypipe.errors import package_of
from raypipe.graph.source import SourceCode, source_of

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


class CodeHash:
    """Hash over a function and everything that it uses, and the user's modules among that.

    It covers what pickle would store, with the code of the user's functions and classes in place of
    their names. Of objects whose state is not a value, such as loggers, and of those that pickle
    refuses, the type alone counts. Nothing depends on addresses, or on the order of sets. Installed
    packages count by their names.
    """

    def __init__(self, value: Any) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, Any] = {}
        self._modules: set[str] = set()
        self._add(value)
        self.digest = self._hash.hexdigest()[:16]

    def source(self) -> SourceCode:
        """Return the source of the user's modules, and of those that they import."""
        modules, files = dict[str, str](), dict[str, bytes]()
        for name in sorted(self._modules):
            with suppress(ImportError, ValueError):  # made in memory
                found = source_of(name)
                modules |= found.modules
                files |= found.files
        return SourceCode(modules, files)

    def _add(self, value: Any) -> None:
        parts: list[Any] = []
        if type(value) in _PLAIN:
            text = f"{type(value).__name__} {value!r}"
        elif id(value) in self._seen:
            text = "again"
        else:
            self._seen[id(value)] = value  # kept alive: the address is not used again
            parts = list(self._parts(value))
            text = f"{len(parts)} parts"
        content = text.encode(errors="surrogatepass")
        self._hash.update(b"%d:%b" % (len(content), content))
        for part in parts:
            self._add(part)

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
