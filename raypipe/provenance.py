"""Provenance: the command, code, packages and machines that results come from."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from raypipe.hardware import detect, torch_version

#: packages whose versions the table ``environment`` records, by their names on PyPI
PACKAGES = (
    "torch",
    "ray",
    "numpy",
    "scipy",
    "scikit-learn",
    "numba",
    "optuna",
    "pandas",
    "pyarrow",
    "pydantic",
    "tokenizers",
    "transformers",
    "sentence-transformers",
    "rouge-score",
)
#: reading metadata is slow, and a process keeps what it imported; a missing package is not cached
_version = cache(version)


def now() -> str:
    """Return the current time, UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat()


def ago(seconds: float) -> str:
    """Return the time ``seconds`` ago, UTC, in ISO 8601."""
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()


def package_version(name: str) -> str | None:
    """Return the installed version of a package, without importing it; None if it is missing."""
    try:
        return _version(name)
    except PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Return the commit of the current directory, followed by ``+`` if files differ from it.

    None outside of a git repository.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}+" if _git("status", "--porcelain") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def environment_row() -> dict[str, Any]:
    """Return this node's row of the table ``environment``: hardware and package versions."""
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
        "cuda": torch_version()[1],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "raypipe": package_version("raypipe-runner"),
        **{name.replace("-", "_"): package_version(name) for name in PACKAGES},
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=10,
    )
    return done.stdout.strip()
