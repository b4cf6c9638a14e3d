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


def text_hints(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and what to write for texts without quotes that are probably meant otherwise.

    One per kind, of a text that :func:`load_yaml` reads.
    """
    seen: set[str] = set()
    for node, _, in_list in _nodes(yaml.compose(text, Loader=_Loader)):
        if isinstance(node, yaml.ScalarNode) and node.style is None:
            found = [h for form, h in _HINTS.items() if re.fullmatch(form, node.value)]
            if in_list and re.fullmatch(_RANGE, node.value):
                found = ["{} in a list is a text; a range is written without brackets"]
            if node.tag == _TAG + "str" and found and found[0] not in seen:
                yield node.start_mark.line + 1, found[0].format(node.value)
            seen.update(found)


def _nodes(root: yaml.Node | None) -> Iterator[tuple[yaml.Node, int, bool]]:
    """Yield the values of a text, those of an alias at each use: the depth, whether in a list."""
    todo = [] if root is None else [(root, 0, False)]
    while todo:
        node, depth, in_list = todo.pop()
        yield node, depth, in_list
        if isinstance(node, yaml.MappingNode):
            todo += [(value, depth + 1, False) for _, value in reversed(node.value)]
        elif isinstance(node, yaml.SequenceNode):
            todo += [(item, depth + 1, True) for item in reversed(node.value)]


def _check_nodes(root: yaml.Node | None) -> None:
    """Reject keys that are repeated or not text, and aliases that expand to too many values.

    A value that holds itself is nested without an end.
    """
    for number, (node, depth, _) in enumerate(_nodes(root)):
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag not in _OF_KEYS or not key.value:
                raise _error("a key must be text; write quotes around a number", key)
            if key.value in seen:  # before merges (<<) add keys, which may be overridden
                raise _error(f"the key {key.value!r} is given twice", key)
            seen.add(key.value)
        if number >= _MAX_VALUES or depth > MAX_DEPTH:
            problem = f"more than {_MAX_VALUES} values"
            raise _error("nested too deeply, or in itself" if depth > MAX_DEPTH else problem, node)


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
_UNKNOWN = {_TAG + kind for kind in ("binary", "omap", "pairs", "set", "timestamp")}  # not in JSON
#: a copy: the dictionary of the class above is that of every ``yaml.safe_load``
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag not in _UNKNOWN
}
_OF_KEYS = (_TAG + "str", _TAG + "merge")
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
