"""Validation of merged values against a settings model, with the key and origin of each error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raypipe.config.settings import Level
from raypipe.errors import ConfigError
from raypipe.redaction import HIDDEN, is_secret, without_secrets

_MAX_MISTAKES = 50
_MAX_SHOWN = 300
#: similarity from which one name of a key is a misspelling of another
_NEAR = 0.65


def validate(
    values: Mapping[str, Any], levels: Sequence[Level], model: type[BaseModel]
) -> BaseModel:
    """Return the settings from the merged values of ``levels``, the highest first.

    Raises:
        ConfigError: values are invalid; one line for each.

    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines: dict[str, str] = {}
        details = error.errors()
        for detail in details[:_MAX_MISTAKES]:
            where, what = _explain(detail, levels, model)
            # a union type reports an error per alternative
            lines[where] = f"{lines[where]}, or {what}" if where in lines else what
        message = "\n".join(f"{where}: {what}" for where, what in lines.items())
        if len(details) > _MAX_MISTAKES:
            message += f"\n... and {len(details) - _MAX_MISTAKES} more"
        raise ConfigError(message) from error


def _explain(
    detail: ErrorDetails, levels: Sequence[Level], model: type[BaseModel]
) -> tuple[str, str]:
    """Return the place of an error and its description."""
    location = _location(detail["loc"], model)
    key = shorten(".".join(location))
    origin = _origin(location, levels)
    given = HIDDEN if any(map(is_secret, location)) else shown(without_secrets(detail["input"]))
    if detail["type"] == "extra_forbidden":
        allowed = sorted(_keys(model))
        siblings = [name for name in allowed if name.rpartition(".")[0] == key.rpartition(".")[0]]
        names = ", ".join(name.rpartition(".")[2] for name in siblings)
        hint = did_you_mean_key(key, allowed)
        return f"{origin}: {key} = {given}", f"unknown key{hint} (allowed here: {names})"
    message = detail["msg"].removeprefix("Value error, ") or "is not allowed"
    value = f" = {given}" if not isinstance(detail["input"], Mapping) else ""
    if detail["type"] != "value_error":  # pydantic's own sentence
        message = f"{message[0].lower()}{message[1:]}"
        message = message.replace("valid tuple", "list")
        message = re.sub(r"valid dictionary( or instance of \w+)?", "mapping", message)
    return f"{origin}: {key or 'configuration'}{value}", message


def _location(parts: Sequence[int | str], model: type[BaseModel]) -> list[str]:
    """Return the key without the names that pydantic adds for the alternatives of a union."""
    location: list[str] = []
    annotation: Any = model
    for part in parts:
        section = section_of(annotation)
        if section is not None:
            field = section.model_fields.get(str(part))
            annotation = field.annotation if field is not None else None
        elif get_origin(annotation) is dict:  # sections named by the user
            annotation = get_args(annotation)[1]
        elif not isinstance(part, int):
            continue
        location.append(str(part))
    return location


def _origin(location: Sequence[str], levels: Sequence[Level]) -> str:
    """Return the origin of the highest level that gives the key or a section around it."""
    for length in range(len(location), 0, -1):
        for level in levels[:-1]:
            if gives(level, location[:length]):
                return level.origin
    return levels[-2].origin


def gives(level: Level, location: Sequence[str]) -> bool:
    """Whether a level has a value, even null, at a path of keys."""
    *parents, last = location
    section = dig(level.values, *parents)
    return isinstance(section, Mapping) and last in section


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Return every dotted key of a settings model."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if (section := section_of(field.annotation)) is not None:
            yield from _keys(section, f"{prefix}{name}.")


def shown(value: Any) -> str:
    """Return a value for a message, shortened if it is long."""
    return shorten(repr(value))


def shorten(text: str) -> str:
    """Return the text, or the beginning of a long one."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def did_you_mean(word: str, allowed: Sequence[str], cutoff: float = 0.5) -> str:
    """Return a hint at the nearest allowed word, if any is near."""
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def did_you_mean_key(key: str, allowed: Sequence[str]) -> str:
    """Return a hint at the nearest of the dotted keys whose own name is near, if any is."""
    name = _name(key)
    near = [each for each in allowed if difflib.get_close_matches(name, [_name(each)], 1, _NEAR)]
    return did_you_mean(key, near, cutoff=0.0)


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def check_sections(
    values: Mapping[str, Any], origin: str, model: type[BaseModel], prefix: str = ""
) -> None:
    """Reject a plain value in place of a section, which a higher level would hide."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None or name not in values:
            continue
        value = values[name]
        if isinstance(value, Mapping):
            check_sections(value, origin, section, f"{prefix}{name}.")
        elif value is not None or field.annotation is section:
            keys = ", ".join(section.model_fields)
            raise ConfigError(
                f"{origin}: {prefix}{name} = {shown(value)}: must be a section with keys "
                f"(allowed here: {keys})"
            )


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the settings model of a section, even an optional one; None for a plain value."""
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)]
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
        return kinds[0]
    return None


def dig(values: Any, *keys: str) -> Any:
    """Return the value at a path of keys; None if there is none."""
    for key in keys:
        if not isinstance(values, Mapping):
            return None
        values = values.get(key)
    return values
