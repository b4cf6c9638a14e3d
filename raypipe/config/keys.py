"""Every configuration key with its type, default and meaning, read from the settings models."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from raypipe.config.levels import defaults
from raypipe.config.validation import dig, section_of

_PLAIN = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    type(None): "null",
    Any: "any value",
    dict: "mapping",
}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """A configuration key as users see it.

    ``default`` is a plain value; ``required`` keys have none.
    """

    name: str
    type: str
    default: Any
    meaning: str
    required: bool = False
    is_section: bool = False


def keys_of(model: type[BaseModel], prefix: str = "") -> list[Key]:
    """Return every key of a settings model, in the order of its definition.

    Args:
        model: the settings.
        prefix: only keys that begin with this dotted path.

    """
    keys = _keys(model, "", defaults(model))
    return [key for key in keys if f"{key.name}.".startswith(prefix and f"{prefix}.")]


def _keys(model: type[BaseModel], path: str, default_values: Any) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        default = dig(default_values, name)
        yield Key(
            f"{path}{name}",
            "section" if section is not None else type_text(field.annotation, field.metadata),
            default,
            " ".join((field.description or "").split())
            or (section.__doc__ or "").strip().partition("\n")[0],
            required=field.is_required() and section is None,
            is_section=section is not None,
        )
        if section is not None:
            nested = default if isinstance(default, Mapping) else defaults(section)
            yield from _keys(section, f"{path}{name}.", nested)


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a field's type in words, such as ``integer > 0 or null``."""
    bounds = [
        f"{sign} {getattr(marker, name)}"
        for marker in metadata
        for name, sign in _BOUNDS.items()
        if getattr(marker, name, None) is not None
    ]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):  # Annotated
        return type_text(arguments[0], [*annotation.__metadata__, *metadata])
    if origin in (Union, types.UnionType):
        words = " or ".join(dict.fromkeys(type_text(each) for each in arguments))
    elif origin is Literal:
        words = ", ".join(str(each) for each in arguments)
    elif origin in (tuple, list):
        items = [each for each in arguments if each is not Ellipsis]
        words = f"list of {type_text(items[0])}" if items else "list"
        if origin is tuple and Ellipsis not in arguments:
            words = f"{len(items)} values: " + ", ".join(type_text(each) for each in items)
    elif origin is dict:
        words = "mapping"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        words = "section"
    else:
        words = _PLAIN.get(annotation, str(annotation))
    return " ".join([words, *bounds])
