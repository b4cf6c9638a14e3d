"""Hash of a function that no module holds: its code, and all that it uses."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import CodeType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from raypipe.graph.source import SourceCode, source_of

#: types whose text is their value
_PLAIN = (
    *(str, bytes, bytearray, int, float, complex, type(None), type(...), range, slice, Enum),
    *(PurePath, date, time, timedelta, Decimal, Fraction, re.Pattern),
)
_NO_MODULES = ("__main__", "__mp_main__", "builtins")
#: entries of a class that say nothing of its behavior
_NOT_CODE = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"})


class Used:
    """Hash over a function and everything that it uses, and the user's modules among that.

    Functions and classes count by their code, arrays by their values, other objects by their type
    and attributes, those of the standard library by their type alone. Nothing depends on addresses,
    or on the order of sets. Installed packages count by their names.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, Any] = {}
        self._modules: set[str] = set()

    @property
    def digest(self) -> str:
        """The hash of what was added."""
        return self._hash.hexdigest()[:16]

    def source(self) -> SourceCode:
        """Return the source of the user's modules, and of those that they import."""
        modules, files = dict[str, str](), dict[str, bytes]()
        for name in sorted(self._modules):
            try:
                found = source_of(name)
            except (ImportError, ValueError):  # made in memory
                continue
            modules |= found.modules
            files |= found.files
        return SourceCode(modules, files)

    def add(self, value: Any) -> None:
        """Add a value."""
        if isinstance(value, _PLAIN):
            self._put(type(value).__name__, repr(value))
        elif id(value) in self._seen:
            self._put("again")
        else:
            self._seen[id(value)] = value  # kept alive: the address is not used again
            parts = list(self._parts(value))
            self._put(str(len(parts)))
            for part in parts:
                self.add(part)

    def _put(self, *texts: str) -> None:
        for text in texts:
            content = text.encode(errors="surrogatepass")
            self._hash.update(b"%d:%b" % (len(content), content))

    def _parts(self, value: Any) -> Iterable[Any]:
        """Return what decides a value: its kind, and the values that it holds or uses."""
        kind = type(value)
        if isinstance(value, dict):
            return ("dict", *(each for item in value.items() for each in item))
        if isinstance(value, AbstractSet):
            return ("set", *sorted(map(_of_one, value)))
        if isinstance(value, list | tuple | deque):
            return (kind.__name__, *value)
        if isinstance(value, ModuleType):
            self._is_users(value.__name__)
            return "module", value.__name__
        if isinstance(value, functools.partial):
            return "partial", value.func, value.args, value.keywords
        if isinstance(value, MethodType):
            return "method", value.__func__, value.__self__
        if isinstance(value, CodeType):
            names = repr((value.co_names, value.co_varnames))
            return ("code", value.co_code, names, *value.co_consts)
        if isinstance(value, type):
            parts: list[object] = ["class", value.__module__, value.__qualname__]
            if self._is_users(value.__module__):
                own = {k: v for k, v in sorted(vars(value).items()) if k not in _NOT_CODE}
                parts += [value.__bases__, own]
            return parts
        if inspect.isfunction(value):
            if not self._is_users(value.__module__):
                return "function", value.__module__, value.__qualname__
            used = dict(sorted(variables(value).items()))
            return "function", value.__code__, value.__defaults__, value.__kwdefaults__, used
        if inspect.isfunction(wrapped := inspect.unwrap(value)):  # such as lru_cache
            return "wrapped", wrapped
        if isinstance(value, property | classmethod | staticmethod):
            functions = (getattr(value, name, None) for name in ("__func__", "fget", "fset"))
            return (kind.__name__, *functions)
        if (array := _array(value)) is not None:
            return ("array", kind.__name__, *array)
        # of a logger or a file, whose state is not a value, the type alone
        state = None if _is_standard(kind) else getattr(value, "__dict__", None)
        return "object", kind, state

    def _is_users(self, module: str | None) -> bool:
        """Whether a module is the user's, which is noted if there is a file of it."""
        if module is not None and _is_installed(module):
            return False
        if module is not None and module not in _NO_MODULES:
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
        try:
            found[name] = cell.cell_contents
        except ValueError:  # assigned later
            continue
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _of_one(value: Any) -> str:
    one = Used()
    one.add(value)
    return one.digest


def _array(value: Any) -> tuple[Any, ...] | None:
    """Return what decides an array, a tensor or a data frame; None for something else."""
    if not hasattr(value, "__array__") or not hasattr(value, "shape"):
        return None
    labels = [list(getattr(value, name, ())) for name in ("columns", "index")
              if not callable(getattr(value, name, ()))]  # fmt: skip
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
        plain = value.__array__()
        content = plain.tolist() if plain.dtype.hasobject else plain.tobytes()
    except Exception:  # of a package that is not known, such as one without this type of numbers
        return None
    return str(plain.dtype), tuple(plain.shape), content, labels


def _is_standard(kind: type) -> bool:
    """Whether a class is Python's own, and not one that only holds values."""
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names and top != "__main__" and kind is not SimpleNamespace


def _is_installed(module: str) -> bool:
    top = module.partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return False
    if top == "raypipe" or top in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    origin = (spec and spec.origin) or ""
    return "site-packages" in origin or "dist-packages" in origin or origin == "frozen"
