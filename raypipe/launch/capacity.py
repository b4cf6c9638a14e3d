"""What the living nodes of the cluster hold, were they free: Ray waits for ever for more."""

from __future__ import annotations

from collections.abc import Mapping

import ray


def living_nodes() -> dict[str, Mapping[str, float]]:
    """The resources of each node that is alive, by its name."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def room(cpus: float, gpus: float) -> int:
    """How many processes of so many CPUs and GPUs each the nodes run at the same time."""
    return sum(_on(node, cpus, gpus) for node in living_nodes().values())


def _on(node: Mapping[str, float], cpus: float, gpus: float) -> int:
    by_cpu = int(node.get("CPU", 0.0) / cpus + 1e-9)
    return min(by_cpu, int(node.get("GPU", 0.0) / gpus + 1e-9)) if gpus else by_cpu
