"""Configuration file: YAML text checked for its form, before its experiment is known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from raypipe.config.profiles import Profile
from raypipe.config.settings import Level, Settings
from raypipe.config.validation import did_you_mean, shown, validate
from raypipe.config.yaml_text import check_keys, load_yaml, text_hints
from raypipe.errors import ConfigError

log = logging.getLogger(__name__)

#: keys of which one names what runs
NAMES = ("experiment", "function")
_FORMS = {
    "experiment": "must name an importable module, such as experiments.pabbo_lda; for a plain "
    "function give `function: MODULE:FUNCTION` instead",
    "function": "must be MODULE:FUNCTION, such as mymodule:score",
}
_MAX_LENGTH = 2**20


@dataclass(frozen=True)
class Document:
    """A configuration file as read, before it is checked against its experiment.

    It names the module of an ``experiment``, or a ``function`` as ``module:name``; the other one is
    empty. ``loaded`` is the function itself where no other process can import it.
    """

    origin: str
    experiment: str
    function: str
    values: Mapping[str, Any]
    profiles: Mapping[str, Mapping[str, Any]]
    loaded: Callable[..., Any] | None = None


class _Profiles(Settings):
    profiles: dict[str, Profile]


def read(path: str | Path) -> Document:
    """Read a configuration file; warn of texts that are probably meant otherwise.

    Raises:
        ConfigError: it is missing, is not YAML, repeats a key, or names no experiment.

    """
    file = Path(path)
    if file.suffix == ".py" and file.is_file():
        raise ConfigError(
            f"{path}: is Python code, not a configuration; call a function of it with `raypipe map "
            f"{file.stem}:FUNCTION`, or give a YAML file with `experiment: {file.stem}`"
        )
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_MAX_LENGTH + 1)
    except FileNotFoundError as error:
        near = [each.name for each in file.parent.glob("*.y*ml")]
        raise ConfigError(f"{path}: no such file{did_you_mean(file.name, near)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if len(text) > _MAX_LENGTH:
        raise ConfigError(f"{path}: is not a configuration: it has over {_MAX_LENGTH} characters")
    document = parse(text, str(path))
    for line, hint in text_hints(text):
        log.warning("%s: line %d: %s", path, line, hint)
    return document


def parse(text: str, origin: str) -> Document:
    """Return the document of a YAML text. Raises ConfigError."""
    content = load_yaml(text, origin)
    if not isinstance(content, dict):
        raise ConfigError(f"{origin}: must be a mapping of keys to values")
    check_keys(content, origin)
    named = {key: content[key] for key in NAMES if content.get(key) is not None}
    if len(named) > 1:
        raise ConfigError(f"{origin}: has both experiment and function; give one of the two")
    if not named and "experiment" not in content:
        for name in content:
            for near in get_close_matches(name, NAMES, 1, 0.65):
                raise ConfigError(f"{origin}: {name}: unknown key; did you mean {near}?")
    for key, value in (named or {"experiment": None}).items():
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{origin}: {key} = {shown(value)}: {_FORMS[key]}")
    if (profiles := content.get("profiles")) is None:
        profiles = {}
    levels = [Level(origin, content), Level("default", {})]
    validate({"profiles": profiles}, levels, _Profiles)
    values = {key: value for key, value in content.items() if key not in (*NAMES, "profiles")}
    module, function = (named.get(key, "") for key in NAMES)
    return Document(origin, module, function, values, profiles)
