"""Levels of a configuration - command line, profile, file, defaults - merged into settings.

The higher level wins. Sections of a settings model may settle keys that depend on each other
(:meth:`~raypipe.config.settings.Settings.settle`), such as the three batch sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from raypipe.config.settings import Level, Replacing, Settings
from raypipe.config.validation import (
    check_sections,
    gives,
    section_of,
    shorten,
    shown,
    validate,
)
from raypipe.config.yaml_text import MAX_DEPTH, check_keys, has_comment, load_yaml, text_hints
from raypipe.errors import ConfigError
from raypipe.redaction import HIDDEN, is_secret, without_credentials, without_secrets

log = logging.getLogger(__name__)


def settings_of(levels: Sequence[Level], model: type[BaseModel]) -> tuple[Any, list[Level]]:
    """Return the validated settings of these levels (highest first), and the normalized levels.

    Raises:
        ConfigError: unknown keys, wrong types, contradictions: one line for each.

    """
    levels = [Level(level.origin, _spelled_out(level.values, model)) for level in levels]
    for level in levels[:-1]:
        check_sections(level.values, level.origin, model)
    values: dict[str, Any] = {}
    for level in reversed(levels):
        merge_into(values, level.values, model)
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and issubclass(section, Settings):
            parts = [Level(level.origin, level.get(name)) for level in levels]
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
    giving = (level for level in levels[:-1] if gives(level, key.split(".")))
    return next(giving, levels[-1]).origin


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


def _copy(value: Any) -> Any:
    """Return a copy of a section: a :class:`Replacing` one stays one."""
    if not isinstance(value, Mapping):
        return value
    copied = {name: _copy(each) for name, each in value.items()}
    return Replacing(copied) if isinstance(value, Replacing) else copied


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


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the overrides as nested sections; warn of texts that are probably meant otherwise.

    Mappings of the same key are merged. An empty one drops what comes before it, here and on
    lower levels.

    Raises:
        ConfigError: an override that is not valid.

    """
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        parts = key.split(".")
        shown_as = f"command line: {shorten(hidden_override(override))}"
        if not (separator and all(parts) and key.isprintable()):
            raise ConfigError(
                f"command line: {shown(override)}: must have the form dotted.key=value"
            )
        if len(parts) > MAX_DEPTH:
            raise ConfigError(f"{shown_as}: nested too deeply")
        try:
            value = load_yaml(text, shown_as)
        except ConfigError as error:  # the cause quotes the text
            if hidden_override(override) == override:
                cut = text[:1] in ("[", "{") and text[-1:] not in ("]", "}")
                hint = "; write quotes around the whole, so that the shell does not split it"
                raise ConfigError(f"{error}{hint if cut else ''}") from None
            raise ConfigError(f"{shown_as}: not valid YAML") from None
        if has_comment(text):  # dropped without a word, what was meant as text would be lost
            raise ConfigError(
                f"{shown_as}: a # begins a comment in YAML; write quotes around the text, within "
                f"those of the shell, as in \"{key}='no #1'\""
            )
        check_keys(value, "command line", f"{shorten(key)}.")
        _warn(key.removeprefix("arguments."), text, override)
        merge_into(values, nested({key: Replacing() if value == {} else value}))
    return values


def hidden_override(override: str) -> str:
    """Return an override for display: secrets are replaced by ``***``."""
    key, separator, text = override.partition("=")
    if separator and (any(map(is_secret, key.split("."))) or _has_secrets(text)):
        return f"{key}={HIDDEN}"
    return without_credentials(override)


def _warn(key: str, text: str, override: str) -> None:
    if hidden_override(override) != override:
        return
    hints = [hint for _, hint in text_hints(text)]
    if not text.strip():
        hints.append(f"no value is null; write \"{key}=''\" for an empty text")
    for hint in hints:
        log.warning("command line: %s: %s", key, hint)


def _has_secrets(text: str) -> bool:
    """Whether a section or a list written as YAML holds secrets."""
    try:
        value = load_yaml(text, "")
    except ConfigError:
        return False
    return isinstance(value, Mapping | list) and without_secrets(value) != value
