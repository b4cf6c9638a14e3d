"""Rounds of alternating contenders: their order, the spread of figures, the file of results."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from raypipe.hardware import detect
from raypipe.provenance import git_commit, package_version


def rotated(names: Sequence[str], number: int) -> Sequence[str]:
    """Return the order of the contenders in a round: each one begins in turn."""
    turn = number % len(names)
    return (*names[turn:], *names[:turn])


def extent(values: Iterable[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    found = list(values)
    return {"median": median(found), "low": min(found), "high": max(found)}


def write_report(file: Path, started: str, packages: Iterable[str], **found: Any) -> None:
    """Write results as JSON, with commit, machine and versions of packages."""
    report = {
        "started": started,
        "commit": git_commit(),
        "machine": machine(),
        "packages": {package: package_version(package) for package in packages},
        **found,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return a description of this machine, of which one thread of a CPU is measured."""
    hardware, lines = detect(), Path("/proc/cpuinfo")
    found = re.findall(r"^model name\s*: (.*)$", lines.read_text() if lines.is_file() else "", re.M)
    return {
        "device": "cpu",
        "cpu": found[0] if found else platform.machine(),
        "cpus": hardware.cpus,
        "memory_bytes": hardware.memory_bytes,
        "threads": 1,
        "python": platform.python_version(),
    }
