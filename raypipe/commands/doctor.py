"""``raypipe doctor``: hardware, package versions and the Ray cluster of this machine."""

from __future__ import annotations

from typing import Any

from raypipe import hardware
from raypipe.launch import in_cluster
from raypipe.provenance import environment_row, git_commit


def doctor() -> dict[str, Any]:
    """Return this machine's hardware and packages, and the Ray cluster if there is one."""
    from raypipe.launch.cluster import RayLauncher

    report: dict[str, Any] = {
        **environment_row(),
        "git_commit": git_commit(),
        "hardware": hardware.detect().as_dict(),
        "cluster": None,
    }
    if in_cluster():
        launcher = RayLauncher()
        try:
            nodes = launcher.on_every_node(hardware.detect)
            report["cluster"] = [node.as_dict() for node in nodes]
        finally:
            launcher.close()
    return report
