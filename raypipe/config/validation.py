"""Levels of a configuration - command line, profile, file, defaults - as validated settings.

The higher level wins. Sections of a settings model may settle keys that depend on each other
(:meth:`~raypipe.config.settings.Settings.settle`), such as the three batch sizes. A mistake is
reported with its key and the level that has it.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import logging
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raypipe.config.settings import Level, Replacing, Settings
from raypipe.config.yaml_text import MAX_DEPTH, has_comment, load_yaml, text_hints
from raypipe.errors import ConfigError
from raypipe.redaction import HIDDEN, is_secret, without_credentials, without_secrets

log = logging.getLogger(__name__)

_MAX_MISTAKES = 50
_MAX_SHOWN = 300
#: similarity from which one name of a key is a misspelling of another
_NEAR = 0.65
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


def settings_of(levels: Sequence[Level], model: type[BaseModel]) -> tuple[Any, list[Level]]:
    """Return the validated settings of these levels (highest first), and the normalized levels.

    Raises:
        ConfigError: unknown keys, wrong types, contradictions: one line for each.

    """
    levels = [Level(each.origin, _spelled_out(each.values, each.origin, model)) for each in levels]
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


def _spelled_out(
    values: Mapping[str, Any], origin: str, model: type[BaseModel], prefix: str = ""
) -> dict[str, Any]:
    """Return the values of a level with abbreviated sections in their full form.

    Raises:
        ConfigError: a plain value in place of a section, which a higher level would hide.

    """
    result = dict(values)
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None or name not in values:
            continue
        value = values[name]
        if issubclass(section, Settings):
            value = section.spelled_out(value)
        if isinstance(value, Mapping):
            result[name] = _spelled_out(value, origin, section, f"{prefix}{name}.")
        elif value is not None or field.annotation is section:
            keys = ", ".join(section.model_fields)
            raise ConfigError(
                f"{origin}: {prefix}{name} = {shown(value)}: must be a section with keys "
                f"(allowed here: {keys})"
            )
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
        safe = hidden_override(override)
        shown_as = f"command line: {shorten(safe)}"
        if not (separator and all(parts) and key.isprintable()):
            raise ConfigError(
                f"command line: {shown(override)}: must have the form dotted.key=value"
            )
        if len(parts) > MAX_DEPTH:
            raise ConfigError(f"{shown_as}: nested too deeply")
        try:
            value = load_yaml(text, shown_as)
        except ConfigError as error:
            if safe != override:  # the cause quotes the text
                raise ConfigError(f"{shown_as}: not valid YAML") from None
            cut = text[:1] in ("[", "{") and text[-1:] not in ("]", "}")
            hint = "; write quotes around the whole, so that the shell does not split it"
            raise ConfigError(f"{error}{hint if cut else ''}") from None
        if has_comment(text):  # dropped without a word, what was meant as text would be lost
            raise ConfigError(
                f"{shown_as}: a # begins a comment in YAML; write quotes around the text, within "
                f"those of the shell, as in \"{key}='no #1'\""
            )
        key_shown, hints = key.removeprefix("arguments."), [hint for _, hint in text_hints(text)]
        if not text.strip():
            hints.append(f"no value is null; write \"{key_shown}=''\" for an empty text")
        for hint in hints if safe == override else ():
            log.warning("command line: %s: %s", key_shown, hint)
        merge_into(values, nested({key: Replacing() if value == {} else value}))
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
        return any(map(is_secret, re.findall(r"([\w-]+)['\"]?\s*:", text)))
    return isinstance(value, Mapping | list) and without_secrets(value) != value


# validation


def validate(
    values: Mapping[str, Any], levels: Sequence[Level], model: type[BaseModel]
) -> BaseModel:
    """Return the settings from the merged values of ``levels``, the highest first.

    Raises:
        ConfigError: values are invalid; one line for each.

    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines: dict[str, str] = {}
        details = error.errors()
        for detail in details[:_MAX_MISTAKES]:
            where, what = _explain(detail, levels, model)
            # a union type reports an error per alternative
            lines[where] = f"{lines[where]}, or {what}" if where in lines else what
        message = "\n".join(f"{where}: {what}" for where, what in lines.items())
        if len(details) > _MAX_MISTAKES:
            message += f"\n... and {len(details) - _MAX_MISTAKES} more"
        raise ConfigError(message) from error


def _explain(
    detail: ErrorDetails, levels: Sequence[Level], model: type[BaseModel]
) -> tuple[str, str]:
    """Return the place of an error and its description."""
    location = _location(detail["loc"], model)
    key = shorten(".".join(location))
    origin = _origin(location, levels)
    given = HIDDEN if any(map(is_secret, location)) else shown(without_secrets(detail["input"]))
    if detail["type"] == "extra_forbidden":
        allowed = sorted(each.name for each in keys_of(model))
        siblings = [name for name in allowed if name.rpartition(".")[0] == key.rpartition(".")[0]]
        names = ", ".join(name.rpartition(".")[2] for name in siblings)
        own = [name for name in allowed if _is_near(key, name)]
        hint = did_you_mean(key, own, cutoff=0.0)
        return f"{origin}: {key} = {given}", f"unknown key{hint} (allowed here: {names})"
    message = detail["msg"].removeprefix("Value error, ") or "is not allowed"
    value = f" = {given}" if not isinstance(detail["input"], Mapping) else ""
    if detail["type"] != "value_error":  # pydantic's own sentence
        message = f"{message[0].lower()}{message[1:]}"
        message = message.replace("valid tuple", "list")
        message = re.sub(r"valid dictionary( or instance of \w+)?", "mapping", message)
    return f"{origin}: {key or 'configuration'}{value}", message


def _location(parts: Sequence[int | str], model: type[BaseModel]) -> list[str]:
    """Return the key without the names that pydantic adds for the alternatives of a union."""
    location: list[str] = []
    annotation: Any = model
    for part in parts:
        section = section_of(annotation)
        if section is not None:
            field = section.model_fields.get(str(part))
            annotation = field.annotation if field is not None else None
        elif get_origin(annotation) is dict:  # sections named by the user
            annotation = get_args(annotation)[1]
        elif not isinstance(part, int):
            continue
        location.append(str(part))
    return location


def _origin(location: Sequence[str], levels: Sequence[Level]) -> str:
    """Return the origin of the highest level that gives the key or a section around it."""
    heads = (location[:length] for length in range(len(location), 0, -1))
    giving = (level for head in heads for level in levels[:-1] if gives(level.values, head))
    return next(giving, levels[-2]).origin


def gives(values: Any, path: Sequence[str]) -> bool:
    """Whether a level gives a key, or a section around it in its short form, as one value."""
    for name in path:
        if not isinstance(values, Mapping) or name not in values:
            return not isinstance(values, Mapping)
        values = values[name]
    return True


def shown(value: Any) -> str:
    """Return a value for a message, shortened if it is long."""
    return shorten(repr(value))


def shorten(text: str) -> str:
    """Return the text, or the beginning of a long one."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def did_you_mean(word: str, allowed: Sequence[str], cutoff: float = 0.5) -> str:
    """Return a hint at the nearest allowed word, if any is near."""
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def near_and_all(word: str, allowed: Sequence[str], title: str = "there are") -> str:
    """Return the end of a message on an unknown word: the nearest allowed one, and all of them."""
    return f"{did_you_mean(word, allowed)} ({title}: {', '.join(allowed) or 'none'})"


def _is_near(key: str, other: str) -> bool:
    """Whether the own names of two dotted keys are near."""
    name, of_other = (each.rpartition(".")[2] for each in (key, other))
    return bool(difflib.get_close_matches(name, [of_other], 1, _NEAR))


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the settings model of a section, even an optional one; None for a plain value."""
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)]
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
        return kinds[0]
    return None


def dig(values: Any, *keys: str) -> Any:
    """Return the value at a path of keys; None if there is none."""
    for key in keys:
        if not isinstance(values, Mapping):
            return None
        values = values.get(key)
    return values


# keys


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


def keys_of(model: type[BaseModel]) -> list[Key]:
    """Return every key of a settings model, in the order of its definition."""
    return list(_keys(model, "", defaults(model)))


def _keys(model: type[BaseModel], path: str, default_values: Any) -> Iterator[Key]:
    meanings = _meanings(model)
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        default = dig(default_values, name)
        yield Key(
            f"{path}{name}",
            "section" if section is not None else type_text(field.annotation, field.metadata),
            default,
            " ".join((field.description or meanings.get(name, "")).split())
            or (section.__doc__ or "").strip().partition("\n")[0],
            required=field.is_required() and section is None,
            is_section=section is not None,
        )
        if section is not None:
            nested = default if isinstance(default, Mapping) else defaults(section)
            yield from _keys(section, f"{path}{name}.", nested)


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the text below each field in the source of a settings model, as far as it has one.

    Pydantic would read the sources of all models at each start.
    """
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if issubclass(owner, Settings):
            found |= _classes(owner.__module__).get(owner.__name__, {})
    return found


@cache
def _classes(module: str) -> dict[str, dict[str, str]]:
    """Return the text below each annotated name, for each class in the source of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):  # as of a notebook
        return {}
    found: dict[str, dict[str, str]] = {}
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for owner in owners:
        for pair in pairwise(owner.body):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found.setdefault(owner.name, {})[name] = text
    return found


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
