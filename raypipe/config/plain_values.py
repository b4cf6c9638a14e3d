"""Plain values for settings and arguments, from those of Python and NumPy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from raypipe.errors import ConfigError


def plain(value: Any) -> Any:
    """Return ranges and arrays as lists, NumPy's scalars as Python's, and paths as text.

    Raises:
        ConfigError: a value that no file could hold.

    """
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist()) if value is not value.tolist() else value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{value!r:.100}: a value of type {type(value).__name__} cannot be a setting or an "
        "argument, since it has no stable text; give plain values, and build or load the object in "
        "the function"
    )
