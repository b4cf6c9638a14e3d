"""YAML loader: numbers as in YAML 1.2, duplicate keys are errors, and aliases are bounded.

Parsing costs no more than the length of the text: the number of values that aliases expand to is
limited, and deep nesting is rejected before anything traverses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from raypipe.errors import ConfigError

#: maximum depth of sections, or parts of a dotted key
MAX_DEPTH = 64
_MAX_VALUES = 100_000
_MAX_DIGITS = 100

_INTEGER = r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+"
_REAL = (
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_PLAIN = r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?"
#: plain texts that are often meant otherwise, each with what to write
_HINTS = {
    r"[nN]one": "{} is a text here; write null for Python's None",
    r"(?i:[-+]?(nan|inf|infinity))": "{} is a text here; write .nan or .inf for the number",
    r"[-+]?(0[0-9_]+|[0-9][0-9_]*_[0-9_]*)(\.[0-9_]*)?": "{} is a text here: a number has no "
    "leading zero and no underscore; write quotes around a text",
    rf"{_PLAIN}(, *{_PLAIN})+": "{0} is one text; write [{0}] for several values",
    r"range\(.*\)|(?!-?[0-9]+\.\.-?[0-9]+$)[-+]?[0-9][-+0-9.eE,]*\.\.[-+0-9.eE,]*": "{} is a text "
    "here; write 0..4 for the integers from 0 to 4",
}
_RANGE = r"-?[0-9]+\.\.-?[0-9]+"


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


def dump_yaml(value: Any, **options: Any) -> str:
    """Return a value as YAML that :func:`load_yaml` reads as the same value."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options))


def text_hints(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and what to write for texts without quotes that are probably meant otherwise.

    One per kind, of a text that :func:`load_yaml` reads.
    """
    todo = [(yaml.compose(text, Loader=_Loader), False)]
    seen: set[object] = set()
    while todo:
        node, in_list = todo.pop()
        if isinstance(node, yaml.MappingNode) and node not in seen:
            todo += [(value, False) for _, value in reversed(node.value)]
        elif isinstance(node, yaml.SequenceNode) and node not in seen:
            todo += [(item, True) for item in reversed(node.value)]
        elif isinstance(node, yaml.ScalarNode) and node.style is None:
            found = [h for form, h in _HINTS.items() if re.fullmatch(form, node.value)]
            if in_list and re.fullmatch(_RANGE, node.value):
                found = ["{} in a list is a text; a range is written without brackets"]
            if node.tag == _TAG + "str" and found and found[0] not in seen:
                yield node.start_mark.line + 1, found[0].format(node.value)
            seen.update(found)
        seen.add(node)


def has_comment(text: str) -> bool:
    """Whether a text that :func:`load_yaml` reads has a comment."""
    end = 0
    for token in yaml.scan(text, Loader=_Loader):
        if "#" in text[end : token.start_mark.index]:
            return True
        end = max(end, token.end_mark.index)
    return "#" in text[end:]


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

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number; one that a float cannot hold is an error, not infinity."""
        text = self.construct_scalar(node)
        problem = f"{text} exceeds the largest number; write quotes around a text"
        if len(text) > _MAX_DIGITS:
            problem = f"a number has {len(text)} characters"
        elif node.tag == _TAG + "int":
            return int(text, 0)
        else:
            number = float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
            if math.isfinite(number) or "inf" in text.lower() or "nan" in text.lower():
                return number
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

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


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes every text that YAML 1.1 or a reader could take for a number."""


_TAG = "tag:yaml.org,2002:"
for _kind in ("binary", "omap", "pairs", "set", "timestamp"):  # not supported by JSON
    del _Loader.yaml_constructors[_TAG + _kind]
_KEPT = (_TAG + "bool", _TAG + "null", _TAG + "merge")
#: without those of YAML 1.1 that read 1:30 as 90, 010 as 8 and 2024-01-01 as a date
_Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] in _KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _form in (("int", _INTEGER), ("float", _REAL)):
    _Loader.add_constructor(_TAG + _kind, _Loader.construct_number)
    for _class in (_Loader, _Dumper):
        _form_of_all = re.compile(f"^({_form})$")
        _class.add_implicit_resolver(_TAG + _kind, _form_of_all, list("-+.0123456789"))
_Dumper.add_implicit_resolver("!hint", re.compile(f"^({'|'.join(_HINTS)})$"), None)
