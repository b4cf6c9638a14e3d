"""A provider for Ray's cluster launcher: machines that run already are its cloud."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from ray.autoscaler.node_provider import NodeProvider

AUTOSCALER = files("ray.autoscaler")


def completed(cluster: dict[str, Any]) -> dict[str, Any]:
    """``cluster`` with what Ray fills in for AWS, from the file that it installs."""
    defaults: dict[str, Any] = yaml.safe_load(AUTOSCALER.joinpath("aws/defaults.yaml").read_text())
    return defaults | cluster


class Machines(NodeProvider):
    """Nodes are named by their addresses; a terminated machine is not taken again.

    ``provider_config["state"]`` is a JSON file on the file system that all share: for each address
    ``{"type": what node_config["type"] asks for, "running": bool, "tags": {...}}``.
    """

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._file = Path(provider_config["state"])
        self._lock = FileLock(f"{self._file}.lock")

    def offer(self, address: str, kind: str) -> None:
        """One more machine that runs already."""
        with self._changed() as machines:
            machines[address] = {"type": kind, "running": False, "tags": {}}

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        return [
            address
            for address, machine in self._read().items()
            if machine["running"] and tag_filters.items() <= machine["tags"].items()
        ]

    def is_running(self, node_id: str) -> bool:
        return bool(self._read()[node_id]["running"])

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        return dict(self._read()[node_id]["tags"])

    def external_ip(self, node_id: str) -> str:
        return node_id

    def internal_ip(self, node_id: str) -> str:
        return node_id

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        with self._changed() as machines:
            machines[node_id]["tags"] |= tags

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """Raises RuntimeError where there are fewer machines, as a cloud does."""
        with self._changed() as machines:
            free = [
                machine
                for machine in machines.values()
                if machine["type"] == node_config["type"] and not machine["tags"]
            ]
            if len(free) < count:  # Ray waits ten minutes for nodes that it was promised
                raise RuntimeError(f"no capacity for {count} nodes of type {node_config['type']}")
            for machine in free[:count]:
                machine.update(running=True, tags=dict(tags))

    def terminate_node(self, node_id: str) -> None:
        with self._changed() as machines:
            machines[node_id]["running"] = False

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """All machines of the network."""
        with self._lock:
            machines = self._read()
            yield machines
            self._file.write_text(json.dumps(machines))

    def _read(self) -> dict[str, Any]:
        with self._lock:
            machines: dict[str, Any] = json.loads(self._file.read_text())
        return machines
