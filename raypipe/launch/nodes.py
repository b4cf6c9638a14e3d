"""Nodes of the cluster, the room on them, and the wait for more.

Ray keeps work in its queue for as long as no node has the resources, even forever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import UnitError
from raypipe.graph.launcher import R

#: what Ray raises for work on a node that is lost
NODE_GONE = (NodeDiedError, ActorUnschedulableError, TaskUnschedulableError)
#: custom resource, one per CPU: if any node has it, CPU tasks run on such nodes only
TASKS = "raypipe_tasks"
#: seconds; spot instances return within minutes or not at all
WAIT_FOR_NODES_S = 600.0
#: seconds between looks at the nodes
_LOOK_S = 2.0
#: label of nodes that a cluster launcher or an operator starts, and may start more of
_GROUP = "ray.io/node-group"

#: resources of a node or a process by name, as Ray counts them: CPU, GPU, custom ones
Resources = Mapping[str, float]


def living_nodes() -> dict[str, Resources]:
    """Return the resources of each living node by node ID."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def answers(
    nodes: Iterable[str],
    function: Callable[..., R],
    *arguments: Any,
    timeout_s: float | None = None,
    **options: Any,
) -> list[R]:
    """Call a function in a task on each node, by its ID, and return the results.

    A node that is lost meanwhile, or does not answer within ``timeout_s``, has none. ``options``
    are those of the tasks.

    Raises:
        RayError: a task failed for another reason.

    """
    task: Any = ray.remote(num_cpus=0, **options)(function)
    pinned = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    calls = [task.options(scheduling_strategy=node).remote(*arguments) for node in pinned]
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
    results: list[R] = []
    for call in ready:
        with suppress(*NODE_GONE, WorkerCrashedError):
            results.append(ray.get(call))
    return results


def bundle(cpus: float, gpus: float, custom: str | None = None) -> dict[str, float]:
    """Return the resources of one process; ``custom`` is requested in the amount of the CPUs."""
    asked = {"CPU": cpus, "GPU": gpus} | ({custom: cpus} if custom else {})
    return {name: amount for name, amount in asked.items() if amount}


def room(asked: Resources, nodes: Iterable[Resources] | None = None) -> int:
    """Return how many such processes fit on the nodes (default: living) when nothing else runs."""
    nodes = living_nodes().values() if nodes is None else nodes
    return sum(
        min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in asked.items() if amount)
        for node in nodes
    )


class Wait:
    """Wait for room on the nodes, which ends after ten minutes, or at once where it is vain.

    Nodes that were there before may return, and an autoscaler sees what is in Ray's queue.

    Args:
        asked: resources of a process.
        wanted: number of processes that have to fit.
        before: the nodes at the start of the command.
        say: receives a message once the wait begins.

    """

    def __init__(
        self,
        asked: Resources,
        wanted: int,
        before: Iterable[Resources],
        say: Callable[[str], None],
    ) -> None:
        self.asked, self._wanted, self._say = asked, wanted, say
        self.size = " and ".join(f"{amount:g} {name}s" for name, amount in asked.items())
        self.fitted = room(asked, before) >= wanted
        self._looked, self._until = -_LOOK_S, math.inf

    def is_vain(self, unit: str) -> bool:
        """Whether there is no room, and no hope for it. Call this again and again.

        Raises:
            UnitError: no node is left: a cluster without nodes does not recover.

        """
        now = time.monotonic()
        if now < self._looked + _LOOK_S:
            return False
        self._looked = now
        nodes = living_nodes()
        if not nodes:
            reason = "no node of the Ray cluster is alive; run the command again"
            raise UnitError(unit, "node_lost", reason)
        if room(self.asked, nodes.values()) >= self._wanted:
            self.fitted, self._until = True, math.inf
            return False
        # nodes of a kind of which others may be added
        may_grow = any(node["Alive"] and node["Labels"].get(_GROUP) for node in ray.nodes())
        if not self.fitted and not may_grow:
            return True
        if self._until == math.inf:
            self._until = now + WAIT_FOR_NODES_S
            reason = "nodes were lost"
            if not self.fitted:
                reason = f"no room for {self._wanted} x {self.size}, and the cluster may grow"
            self._say(f"{reason}; waiting up to {WAIT_FOR_NODES_S / 60:.0f} minutes for others")
        return now > self._until
