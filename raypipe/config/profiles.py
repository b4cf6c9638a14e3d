"""Profiles: overrides of a configuration, selected by the hardware and by other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import ge
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from raypipe.config.settings import Settings
from raypipe.config.validation import did_you_mean, dig
from raypipe.errors import ConfigError
from raypipe.hardware import Hardware, lowest_compute_capability


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

    Raises:
        ConfigError: ``wanted`` is not a profile, or one is made for an unknown setting.

    """
    for name, profile in profiles.items():
        for key in profile.get("for", {}):
            if (section := key.partition(".")[0]) not in known:
                raise ConfigError(
                    f"{origin}: profiles.{name}.for.{key}: unknown key"
                    f"{did_you_mean(section, known)}"
                )
    if wanted == "auto":
        return pick_profile(profiles, nodes, levels)
    allowed = sorted({"cpu", "gpu", *profiles})
    if wanted not in allowed:
        raise ConfigError(
            f"command line: --profile {wanted}: unknown profile{did_you_mean(wanted, allowed)} "
            f"(allowed: auto, {', '.join(allowed)})"
        )
    return wanted


def pick_profile(
    profiles: Mapping[str, Mapping[str, Any]],
    nodes: Sequence[Hardware],
    levels: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the name of the profile for these nodes and settings.

    Without a GPU it is ``cpu``. With GPUs it is a profile whose name begins with ``gpu``, or that
    names the settings that it is made for (``for``) and they are given, and whose
    ``min_gpu_memory_gb`` and ``min_compute_capability`` (default 0) every GPU meets: the one made
    for most settings, then the one with the largest memory requirement, then the largest
    capability; ``gpu`` if there is none.
    """
    memories = [gpu.memory_bytes for node in nodes for gpu in node.gpus]
    capability = lowest_compute_capability(nodes)
    if capability is None:
        return "cpu"
    # a card sold as 24 GB has at least 24e9 bytes
    has = min(memories) / 1e9, float(capability)
    fitting: dict[str, tuple[float, ...]] = {}
    for name, content in profiles.items():
        profile = Profile.model_validate(content)
        least = profile.min_gpu_memory_gb, profile.min_compute_capability
        are_given = all(
            _given(levels, key) in (values if isinstance(values, list) else [values])
            for key, values in profile.made_for.items()
        )
        if (profile.made_for or name.startswith("gpu")) and are_given and all(map(ge, has, least)):
            fitting[name] = len(profile.made_for), *least
    return max(fitting, key=lambda name: fitting[name], default="gpu")


def _given(levels: Sequence[Mapping[str, Any]], dotted: str) -> Any:
    """Return the plain value of a dotted key on the highest level that has one, else None."""
    values = (dig(level, *dotted.split(".")) for level in levels)
    return next((v for v in values if v is not None and not isinstance(v, Mapping)), None)
