"""Where results come from: the code, the packages and the machine of each run."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from raypipe.hardware import detect


def now() -> str:
    """The current time, UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat()


def package_version(name: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of the current directory, with ``+`` where files differ from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}+" if _git("status", "--porcelain") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def environment_row() -> dict[str, Any]:
    """The row of the ``environment`` table for the node this runs on."""
    import torch

    hardware = detect()
    return {
        "hostname": hardware.hostname,
        "cpus": hardware.cpus,
        "memory_bytes": hardware.memory_bytes,
        "gpus": ", ".join(gpu.name for gpu in hardware.gpus) or None,
        "gpu_count": len(hardware.gpus),
        "gpu_memory_bytes": sum(gpu.memory_bytes for gpu in hardware.gpus),
        "gpu_driver": hardware.driver,
        "cuda_driver": hardware.cuda,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "ray": package_version("ray"),
        "raypipe": package_version("raypipe"),
        "scikit_learn": package_version("scikit-learn"),
        "platform": platform.platform(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
