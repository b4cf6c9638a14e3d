"""Overrides from the command line: ``dotted.key=value``, the value in YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raypipe.config.validation import shorten, shown
from raypipe.config.yaml_text import MAX_DEPTH, check_keys, load_yaml
from raypipe.errors import ConfigError
from raypipe.redaction import HIDDEN, is_secret, without_credentials, without_secrets


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the overrides as nested sections. Raises ConfigError."""
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        *parents, last = key.split(".")
        shown_as = f"command line: {shorten(hidden_override(override))}"
        if not (separator and all((*parents, last)) and key.isprintable()):
            raise ConfigError(
                f"command line: {shown(override)}: must have the form dotted.key=value"
            )
        if len(parents) >= MAX_DEPTH:
            raise ConfigError(f"{shown_as}: nested too deeply")
        try:
            value = load_yaml(text, shown_as)
        except ConfigError as error:  # the cause quotes the text
            if hidden_override(override) == override:
                cut = text[:1] in ("[", "{") and text[-1:] not in ("]", "}")
                hint = "; write quotes around the whole, so that the shell does not split it"
                raise ConfigError(f"{error}{hint if cut else ''}") from None
            raise ConfigError(f"{shown_as}: not valid YAML") from None
        check_keys(value, "command line", f"{shorten(key)}.")
        target = values
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{shown_as}: {parent} was given a value before")
        target[last] = value
    return values


def hidden_override(override: str) -> str:
    """Return an override for display: secrets are replaced by ``***``."""
    key, separator, text = override.partition("=")
    if separator and (any(map(is_secret, key.split("."))) or _has_secrets(text)):
        return f"{key}={HIDDEN}"
    return without_credentials(override)


def _has_secrets(text: str) -> bool:
    """Whether a section or a list written as YAML holds secrets."""
    try:
        value = load_yaml(text, "")
    except ConfigError:
        return False
    return isinstance(value, Mapping | list) and without_secrets(value) != value
