"""Profiles: overrides of a configuration, selected by the hardware and by other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import ge
from typing import Any

from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.hardware import Hardware, lowest_compute_capability

#: requirements that a profile may state for every GPU, and the kind of their values
CONDITIONS = {
    "min_gpu_memory_gb": "a number of GB",
    "min_compute_capability": "a number, such as 8.0",
}
#: key of a profile for the settings that it is made for: a value, or several, by dotted key
FOR = "for"


def check_made_for(
    profiles: Mapping[str, Mapping[str, Any]], known: Sequence[str], origin: str
) -> None:
    """Raise ConfigError for a profile made for a setting outside of the sections ``known``."""
    for name, profile in profiles.items():
        for key in profile.get(FOR, {}):
            if (section := key.partition(".")[0]) not in known:
                raise ConfigError(
                    f"{origin}: profiles.{name}.{FOR}.{key}: unknown key"
                    f"{did_you_mean(section, known)}"
                )


def profile_name(
    profiles: Mapping[str, Mapping[str, Any]],
    wanted: str,
    nodes: Sequence[Hardware],
    levels: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the profile to use: ``wanted``, or for ``auto`` the one that fits.

    Args:
        profiles: their content by name.
        wanted: the name of a profile, or ``auto``.
        nodes: the hardware.
        levels: the settings of the command line and of the file, the highest first.

    Raises:
        ConfigError: ``wanted`` is not a profile.

    """
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
    requirements = {
        name: (len(made_for), *(float(profile.get(key, 0)) for key in CONDITIONS))
        for name, profile in profiles.items()
        if (made_for := profile.get(FOR, {})) or name.startswith("gpu")
        if all(
            _given(levels, key) in (values if isinstance(values, list) else [values])
            for key, values in made_for.items()
        )
    }
    fitting = [name for name, least in requirements.items() if all(map(ge, has, least[1:]))]
    return max(fitting, key=lambda name: requirements[name], default="gpu")


def _given(levels: Sequence[Mapping[str, Any]], dotted: str) -> Any:
    """Return the plain value of a dotted key on the highest level that has one, else None."""
    for level in levels:
        value: Any = level
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and not isinstance(value, Mapping):
            return value
    return None
