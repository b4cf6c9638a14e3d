"""Profiles: overrides of a configuration that are selected by the hardware."""

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


def profile_name(
    profiles: Mapping[str, Mapping[str, Any]], wanted: str, nodes: Sequence[Hardware]
) -> str:
    """Return the profile to use: ``wanted``, or for ``auto`` the one that fits the hardware.

    Raises:
        ConfigError: ``wanted`` is not a profile.

    """
    if wanted == "auto":
        return pick_profile(profiles, nodes)
    allowed = sorted({"cpu", "gpu", *profiles})
    if wanted not in allowed:
        raise ConfigError(
            f"command line: --profile {wanted}: unknown profile{did_you_mean(wanted, allowed)} "
            f"(allowed: auto, {', '.join(allowed)})"
        )
    return wanted


def pick_profile(profiles: Mapping[str, Mapping[str, Any]], nodes: Sequence[Hardware]) -> str:
    """Return the name of the profile for these nodes.

    Without a GPU it is ``cpu``. With GPUs it is a profile whose name begins with ``gpu`` and whose
    ``min_gpu_memory_gb`` and ``min_compute_capability`` (default 0) every GPU meets: the one with
    the largest memory requirement, then the largest capability; ``gpu`` if there is none.
    """
    memories = [gpu.memory_bytes for node in nodes for gpu in node.gpus]
    capability = lowest_compute_capability(nodes)
    if capability is None:
        return "cpu"
    # a card sold as 24 GB has at least 24e9 bytes
    has = min(memories) / 1e9, float(capability)
    requirements = {
        name: tuple(float(profile.get(key, 0)) for key in CONDITIONS)
        for name, profile in profiles.items()
        if name.startswith("gpu")
    }
    fitting = [name for name, least in requirements.items() if all(map(ge, has, least))]
    return max(fitting, key=lambda name: requirements[name], default="gpu")
