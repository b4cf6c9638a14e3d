"""YAML loader: duplicate keys are errors, ``1e-3`` is a number, and aliases are bounded.

Parsing costs no more than the length of the text: the number of values that aliases expand to is
limited, and deep nesting is rejected before anything traverses it.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from raypipe.errors import ConfigError

#: maximum depth of sections, or parts of a dotted key
MAX_DEPTH = 64
_MAX_VALUES = 100_000
_MAX_DIGITS = 100


def load_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text; ``origin`` names it in messages. Raises ConfigError."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise ConfigError(f"{origin}: nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        around = f" ({error.context})" if error.context else ""
        raise ConfigError(f"{origin}: not valid YAML: {place}{error.problem}{around}") from error
    except Exception as error:  # PyYAML does not catch errors of its conversions
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error
    return content


def check_keys(value: Any, origin: str, prefix: str = "") -> None:
    """Reject keys that are not text, anywhere in a value. Raises ConfigError."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            check_keys(item, origin, f"{prefix}{number}.")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not key:
                raise ConfigError(f"{origin}: {prefix}{key}: a key must be text")
            check_keys(item, origin, f"{prefix}{key}.")


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys and reads 1e-3 as a number."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._extent: dict[yaml.Node, tuple[int, int]] = {}

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        node: yaml.SequenceNode = super().compose_sequence_node(anchor)
        self._measure(node, node.value)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:  # before merges (<<) add keys, which may be overridden
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be plain text", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        self._measure(node, [value for _, value in node.value])
        return node

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        """Return an integer; base-60 digits (``1:30``) would take quadratic time."""
        if len(node.value) > _MAX_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number has {len(node.value)} characters", node.start_mark
            )
        return int(self.construct_yaml_int(node))

    def _measure(self, node: yaml.CollectionNode, children: list[yaml.Node]) -> None:
        """Reject aliases that are cyclic or expand to too many values; each use counts."""
        values, depth = 1, 0
        for child in children:
            if isinstance(child, yaml.ScalarNode):
                values += 1
                continue
            if child not in self._extent:  # an alias within its own definition
                raise yaml.constructor.ConstructorError(
                    None, None, "a value holds itself", node.start_mark
                )
            more, below = self._extent[child]
            values, depth = values + more, max(depth, below)
        if values > _MAX_VALUES or depth >= MAX_DEPTH:
            problem = (
                f"more than {_MAX_VALUES} values" if depth < MAX_DEPTH else "nested too deeply"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        self._extent[node] = values, depth + 1


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole_number)
for _kind in (
    "binary",
    "omap",
    "pairs",
    "set",
):  # not supported by JSON
    del _Loader.yaml_constructors[f"tag:yaml.org,2002:{_kind}"]

_Loader.add_implicit_resolver(  # floats of YAML 1.2: PyYAML requires a dot in 1e-3
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
