"""YAML as configurations use it: no key twice, ``1e-3`` is a number, one kind of error."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from raypipe.errors import ConfigError


def load_yaml(text: str, origin: str) -> Any:
    """The value of a YAML text; ``origin`` names it in messages. Raises ConfigError."""
    try:
        content = yaml.load(text, Loader=_Loader)
        json.dumps(content, default=str, skipkeys=True)  # raises for a value that holds itself
    except RecursionError as error:
        raise ConfigError(f"{origin}: nested too deeply") from error
    except Exception as error:  # PyYAML lets through what its conversions raise
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error
    return content


def check_keys(values: Mapping[Any, Any], origin: str, prefix: str = "") -> None:
    """Refuse keys that are no text, also in nested mappings. Raises ConfigError."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if not isinstance(key, str) or not key:
            raise ConfigError(f"{origin}: {name}: a key must be text")
        if isinstance(value, dict):
            check_keys(value, origin, f"{name}.")


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice and reads 1e-3 as a number."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:  # before merges (<<) add keys that may be given again
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be plain text", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return node


_Loader.add_implicit_resolver(  # YAML 1.2's floats: PyYAML's own want a dot in 1e-3
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
