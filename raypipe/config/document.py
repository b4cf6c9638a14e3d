"""Configuration file: YAML text checked for its form, before its experiment is known.

Its profiles are overrides, selected by the hardware and by other settings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from operator import ge
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from raypipe.config.settings import Level, Settings
from raypipe.config.validation import did_you_mean, dig, near_and_all, shown, validate
from raypipe.config.yaml_text import load_yaml, text_hints
from raypipe.errors import ConfigError
from raypipe.hardware import Hardware, lowest_compute_capability

log = logging.getLogger(__name__)

#: keys of which one names what runs
NAMES = ("experiment", "function")
_FORMS = {
    "experiment": "must name an importable module, such as experiments.pabbo_lda; for a plain "
    "function give `function: MODULE:FUNCTION` instead",
    "function": "must be MODULE:FUNCTION, such as mymodule:score",
}
_MAX_LENGTH = 2**20


class Profile(Settings):
    """Overrides of a configuration, with the requirements under which ``auto`` selects them."""

    model_config = ConfigDict(extra="allow")

    min_gpu_memory_gb: float = 0.0
    """Least memory of every GPU in GB."""
    min_compute_capability: float = 0.0
    """Least compute capability of every GPU, such as 8.0."""
    made_for: dict[str, Any] = Field(default_factory=dict, alias="for")
    """Settings that it is made for: a value, or several, by dotted key."""

    @field_validator("made_for", mode="before")
    @classmethod
    def _plain(cls, made_for: Any) -> Any:
        if not isinstance(made_for, dict) or any(
            isinstance(value, dict | None) for value in made_for.values()
        ):
            raise ValueError(
                "must map keys of settings to a value or a list of values, such as {model: large}"
            )
        return made_for


def profile_name(
    profiles: Mapping[str, Mapping[str, Any]],
    wanted: str,
    nodes: Sequence[Hardware],
    levels: Sequence[Mapping[str, Any]],
    known: Sequence[str],
    origin: str,
) -> str:
    """Return the profile to use: ``wanted``, or for ``auto`` the one that fits.

    Args:
        profiles: their content by name.
        wanted: the name of a profile, or ``auto``.
        nodes: the hardware.
        levels: the settings of the command line and of the file, the highest first.
        known: the sections of the configuration.
        origin: the file.

    ``auto`` is ``cpu`` without a GPU. With GPUs it is a profile whose name begins with ``gpu``, or
    that names the settings that it is made for (``for``) and they are given, and whose
    ``min_gpu_memory_gb`` and ``min_compute_capability`` (default 0) every GPU meets: the one made
    for most settings, then the one with the largest memory requirement, then the largest
    capability; ``gpu`` if there is none.

    Raises:
        ConfigError: ``wanted`` is not a profile, or one is made for an unknown setting.

    """
    memories = [gpu.memory_bytes for node in nodes for gpu in node.gpus]
    capability = lowest_compute_capability(nodes)
    # a card sold as 24 GB has at least 24e9 bytes
    has = min(memories, default=0) / 1e9, float(capability or 0)
    fitting: dict[str, tuple[float, ...]] = {}
    for name, content in profiles.items():
        profile = Profile.model_validate(content)
        for key in profile.made_for:
            if (section := key.partition(".")[0]) not in known:
                raise ConfigError(
                    f"{origin}: profiles.{name}.for.{key}: unknown key"
                    f"{did_you_mean(section, known)}"
                )
        least = profile.min_gpu_memory_gb, profile.min_compute_capability
        are_given = all(
            _given(levels, key) in (values if isinstance(values, list) else [values])
            for key, values in profile.made_for.items()
        )
        if (profile.made_for or name.startswith("gpu")) and are_given and all(map(ge, has, least)):
            fitting[name] = len(profile.made_for), *least
    if wanted == "auto":
        best = max(fitting, key=lambda name: fitting[name], default="gpu")
        return "cpu" if capability is None else best
    allowed = ["auto", *sorted({"cpu", "gpu", *profiles})]
    if wanted not in allowed:
        known = near_and_all(wanted, allowed, "allowed")
        raise ConfigError(f"command line: --profile {wanted}: unknown profile{known}")
    return wanted


def _given(levels: Sequence[Mapping[str, Any]], dotted: str) -> Any:
    """Return the plain value of a dotted key on the highest level that has one, else None."""
    values = (dig(level, *dotted.split(".")) for level in levels)
    return next((v for v in values if v is not None and not isinstance(v, Mapping)), None)


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
