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


def load_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text; ``origin`` names it in messages. Raises ConfigError."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        _check_nodes(root)
        return None if root is None else loader.construct_document(root)
    except RecursionError as error:
        raise ConfigError(f"{origin}: nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        around = f" ({error.context})" if error.context else ""
        raise ConfigError(f"{origin}: not valid YAML: {place}{error.problem}{around}") from error
    except Exception as error:  # PyYAML does not catch errors of its conversions
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error


def dump_yaml(value: Any, **options: Any) -> str:
    """Return a value as YAML that :func:`load_yaml` reads as the same value."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options))


def _nodes(root: yaml.Node | None) -> Iterator[tuple[yaml.Node, int]]:
    """Yield the values of a text with their depth, those of an alias at each use."""
    todo = [] if root is None else [(root, 0)]
    while todo:
        node, depth = todo.pop()
        yield node, depth
        if isinstance(node, yaml.MappingNode):
            todo += [(value, depth + 1) for _, value in reversed(node.value)]
        elif isinstance(node, yaml.SequenceNode):
            todo += [(item, depth + 1) for item in reversed(node.value)]


def _check_nodes(root: yaml.Node | None) -> None:
    """Reject keys that repeat or are not text, and aliases that are cyclic or expand too far."""
    path: list[yaml.Node] = []
    for number, (node, depth) in enumerate(_nodes(root)):
        if node in path[:depth]:
            raise _error("a value holds itself", node)
        path[depth:] = [node]
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag not in (_TAG + "str", _TAG + "merge") or not key.value:
                raise _error("a key must be text", key)
            if key.value in seen:  # before merges (<<) add keys, which may be overridden
                raise _error(f"the key {key.value!r} is given twice", key)
            seen.add(key.value)
        if number >= _MAX_VALUES or depth > MAX_DEPTH:
            problem = f"more than {_MAX_VALUES} values"
            raise _error("nested too deeply" if depth > MAX_DEPTH else problem, node)


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def has_comment(text: str) -> bool:
    """Whether a text that :func:`load_yaml` reads has a comment."""
    end = 0
    for token in yaml.scan(text, Loader=_Loader):
        if "#" in text[end : token.start_mark.index]:
            return True
        end = max(end, token.end_mark.index)
    return "#" in text[end:]


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-3 as a number."""

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
        raise _error(problem, node)


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
