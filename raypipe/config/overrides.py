"""Overrides from the command line: ``dotted.key=value``, the value in YAML."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from raypipe.config.levels import merge_into
from raypipe.config.settings import Replacing
from raypipe.config.validation import shorten, shown
from raypipe.config.yaml_text import MAX_DEPTH, check_keys, has_comment, load_yaml, text_hints
from raypipe.errors import ConfigError
from raypipe.redaction import HIDDEN, is_secret, without_credentials, without_secrets

log = logging.getLogger(__name__)


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
        if has_comment(text):  # dropped without a word, what was meant as text would be lost
            raise ConfigError(
                f"{shown_as}: a # begins a comment in YAML; write quotes around the text, within "
                f"those of the shell, as in \"{key}='no #1'\""
            )
        check_keys(value, "command line", f"{shorten(key)}.")
        _warn(key.removeprefix("arguments."), text, override)
        target = values
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{shown_as}: {parent} was given a value before")
        if value == {}:
            value = Replacing()
        before = target.get(last)
        if isinstance(before, dict) and isinstance(value, dict) and value:
            merge_into(before, value)
        else:
            target[last] = value
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
