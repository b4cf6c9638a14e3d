"""Levels of a configuration - command line, profile, file, defaults - merged into settings.

The higher level wins. Sections of a settings model may settle keys that depend on each other
(:meth:`~raypipe.config.settings.Settings.settle`), such as the three batch sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from raypipe.config.settings import Level, Replacing, Settings
from raypipe.config.validation import (
    check_sections,
    dig,
    section_of,
    validate,
)


def settings_of(levels: Sequence[Level], model: type[BaseModel]) -> tuple[Any, list[Level]]:
    """Return the validated settings of these levels (highest first), and the normalized levels.

    Raises:
        ConfigError: unknown keys, wrong types, contradictions: one line for each.

    """
    levels = [Level(level.origin, _spelled_out(level.values, model)) for level in levels]
    for level in levels[:-1]:
        check_sections(level.values, level.origin, model)
    values = _merge(levels, model)
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and issubclass(section, Settings):
            parts = [Level(level.origin, dig(level.values, name)) for level in levels]
            section.settle(name, values.get(name), parts)
    return validate(values, levels, model), levels


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Return the default values of a settings model; a required key has none."""
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
            values[name] = default.model_dump() if isinstance(default, BaseModel) else default
        elif section is not None:
            values[name] = defaults(section)
    return values


def origin_of(key: str, levels: Sequence[Level]) -> str:
    """Return the origin of the highest level that gives a dotted key, else ``default``."""
    *parents, last = key.split(".")
    for level in levels[:-1]:
        section = dig(level.values, *parents)
        if isinstance(section, Mapping) and last in section:
            return level.origin
    return levels[-1].origin


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested sections."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        section = sections
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return sections


def merge_into(
    target: dict[str, Any], values: Mapping[str, Any], model: type[BaseModel] | None = None
) -> None:
    """Merge values of a higher level into those of lower ones, in place.

    An empty mapping, or a :class:`Replacing` one, replaces another one. ``model`` tells which
    mappings are sections, whose keys are always merged.
    """
    for key, value in values.items():
        field = model.model_fields.get(key) if model is not None else None
        section = section_of(field.annotation) if field is not None else None
        replaces = section is None and (not value or isinstance(value, Replacing))
        if isinstance(value, Mapping) and isinstance(target.get(key), dict) and not replaces:
            merge_into(target[key], value, section)
        else:
            target[key] = _copy(value)


def _merge(levels: Sequence[Level], model: type[BaseModel]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for level in reversed(levels):
        merge_into(merged, level.values, model)
    return merged


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _spelled_out(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return the values with abbreviated sections in their full form."""
    result = dict(values)
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None or not issubclass(section, Settings) or name not in values:
            continue
        value = section.spelled_out(values[name])
        result[name] = _spelled_out(value, section) if isinstance(value, Mapping) else value
    return result
