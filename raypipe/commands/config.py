"""``raypipe config``: the resolved configuration with origins, or the keys with their meanings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raypipe import hardware
from raypipe.commands.configuration import read, resolve
from raypipe.config.keys import Key, keys_of
from raypipe.config.levels import origin_of
from raypipe.config.validation import did_you_mean, dig
from raypipe.config.yaml_text import dump_yaml
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.redaction import without_secrets

_WIDTH = 96


def resolved(path: str, overrides: Sequence[str], profile: str) -> str:
    """Return the resolved configuration as YAML, with each value's origin as a comment.

    The origin is ``command line``, ``profile NAME``, ``file``, ``default``, or ``derived`` from
    other keys.
    """
    configuration = _configuration(path, overrides, profile)
    values = without_secrets(configuration.settings.model_dump(mode="json"))
    lines = list(_lines(configuration, values))
    width = min(max((len(line) for line, _ in lines), default=0), _WIDTH)
    head = [f"{key}: {value}" for key, value in configuration.named.items()]
    return "\n".join(
        [*head, *(f"{line:{width}}  # {origin}" if origin else line for line, origin in lines)]
    )


def keys(path: str, overrides: Sequence[str], profile: str, prefix: str = "") -> str:
    """Return every key below a dotted prefix: its type, default and meaning.

    Raises:
        ConfigError: no key begins with the prefix.

    """
    configuration = _configuration(path, overrides, profile)
    found = keys_of(configuration.model, prefix)
    if not found:
        names = [key.name for key in keys_of(configuration.model)]
        raise ConfigError(f"--keys {prefix}: no such key{did_you_mean(prefix, names)}")
    return "\n".join(_described(key) for key in found)


def _configuration(path: str, overrides: Sequence[str], profile: str) -> Configuration:
    return resolve(read(path), overrides, profile, [hardware.detect()])


def _lines(
    configuration: Configuration, values: Mapping[str, Any], path: str = "", depth: int = 0
) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    for name, value in values.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:", ""
            yield from _lines(configuration, value, f"{key}.", depth + 1)
            continue
        yield f"{indent}{name}: {_flow(value)}", _origin(configuration, key)


def _origin(configuration: Configuration, key: str) -> str:
    origin = origin_of(key, configuration.levels)
    final = dig(configuration.settings.model_dump(mode="json"), *key.split("."))
    default = dig(configuration.levels[-1].values, *key.split("."))
    if origin == "default" and final is not None and default is None:
        return "derived"
    if origin == configuration.origin:
        return "file"
    return origin.removeprefix(f"{configuration.origin}, ")


def _described(key: Key) -> str:
    if key.is_section:
        return f"\n{key.name}: {key.meaning}"
    default = "required" if key.required else f"default {_flow(key.default)}"
    meaning = textwrap.indent(textwrap.fill(key.meaning, _WIDTH), "    ")
    return f"{key.name}  ({key.type}; {default})\n{meaning}"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = dump_yaml(value, default_flow_style=True, width=10**9)
    return text.removesuffix("...\n").strip()
