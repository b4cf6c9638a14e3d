"""Arguments of the calls: the product of all lists of values, checked against the signature."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from raypipe.config.axes import values_of
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError

#: calls of one experiment
_MOST_CALLS = 1_000_000


def count(arguments: Mapping[str, Any]) -> int:
    """Return the number of calls."""
    return math.prod(len(values_of(value) or [value]) for value in arguments.values())


def calls(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call; the last argument changes fastest.

    Raises:
        ValueError: there are more than a million calls.

    """
    number = count(arguments)
    if number > _MOST_CALLS:
        raise ValueError(f"arguments: {number:,} calls; at most {_MOST_CALLS:,} are possible")
    lists = [values_of(value) or [value] for value in arguments.values()]
    for values in product(*lists):
        yield dict(zip(arguments, values, strict=True))


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
    parameters, kinds = _parameters(function), inspect.Parameter
    required = [
        name
        for name, each in parameters.items()
        if each.default is kinds.empty
        and each.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]
    for name in required:
        if parameters[name].kind is kinds.POSITIONAL_ONLY:
            raise ConfigError(
                f"{where}: the argument {name!r} is positional-only; arguments are given by name, "
                "so remove the `/` from the signature"
            )
    accepted = keywords(function)
    for name in names:
        if accepted is not None and name not in accepted:
            has = f"it has: {', '.join(accepted)}" if accepted else "it has none"
            raise ConfigError(
                f"{where}: the function has no argument {name!r}{did_you_mean(name, accepted)} "
                f"({has})"
            )
    missing = [name for name in required if name not in names]
    if missing:
        raise ConfigError(
            f"{where}: no value for the argument{'s' * (len(missing) > 1)} {', '.join(missing)}; "
            f"give {missing[0]}=VALUE or {missing[0]}=[VALUE,...]"
        )


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
    kinds = inspect.Parameter
    parameters = _parameters(function)
    if any(each.kind is kinds.VAR_KEYWORD for each in parameters.values()):
        return None
    named = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    return [name for name, each in parameters.items() if each.kind in named]


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: the call itself will tell
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}
