"""Cluster capacity: the nodes, the room on them, and the wait for lost ones.

Ray waits forever for resources that no node has.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import state
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import placement_group, remove_placement_group

from raypipe.errors import UnitError
from raypipe.pipeline.allocator import Claim
from raypipe.training.job import TrainingJob
from raypipe.training.requirements import cpus_of_a_worker

#: custom resource, one per CPU: if any node has it, CPU tasks run on such nodes only
TASKS = "raypipe_tasks"
#: seconds; spot instances return within minutes or not at all
WAIT_FOR_NODES_S = 600.0
_POLL_S = 0.5
_OWN_TYPE = re.compile(r"node_[0-9a-f]{40,}$")


def living_nodes() -> dict[str, Mapping[str, float]]:
    """Return the resources of each living node by node ID, without those that are to leave."""
    leaving = draining_nodes()
    return {
        node["NodeID"]: node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    }


def draining_nodes() -> set[str]:
    """Return the IDs of nodes that will be lost, as Ray's autoscaler or a provider announced.

    Ray starts nothing there any more. There is no public function for it.
    """
    return set(state.get_draining_nodes())


def may_grow() -> bool:
    """Whether an autoscaler that can add nodes manages the cluster.

    Ray runs an autoscaler on clusters of a fixed size, too; there it reports every node as a
    separate type, ``node_ID``.
    """
    status = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    report = json.loads(status).get("autoscaler_report") if status else None
    return report is not None and not any(map(_OWN_TYPE.match, report["active_nodes"]))


def check_alive(unit: str) -> None:
    """Raise UnitError if no node is left: a cluster without nodes does not recover."""
    if not living_nodes():
        raise UnitError(
            unit, "node_lost", "no node of the Ray cluster is alive; run the command again"
        )


def bundle(cpus: float, gpus: float, custom: str | None = None) -> dict[str, float]:
    """Return the resources of one process; ``custom`` is requested in the amount of the CPUs."""
    asked = {"CPU": cpus, "GPU": gpus} | ({custom: cpus} if custom else {})
    return {name: amount for name, amount in asked.items() if amount}


def room(
    cpus: float,
    gpus: float,
    custom: str | None = None,
    nodes: Iterable[Mapping[str, float]] | None = None,
) -> int:
    """Return how many processes of this size fit on the nodes at the same time.

    ``nodes`` defaults to the living nodes.
    """
    asked = bundle(cpus, gpus, custom)
    return sum(_on(node, asked) for node in _or_living(nodes))


def for_tasks(nodes: Iterable[Mapping[str, float]] | None = None) -> str | None:
    """Return the custom resource that CPU tasks must request on these nodes, or None."""
    return TASKS if any(TASKS in node for node in _or_living(nodes)) else None


def _or_living(nodes: Iterable[Mapping[str, float]] | None) -> Iterable[Mapping[str, float]]:
    return living_nodes().values() if nodes is None else nodes


def _on(node: Mapping[str, float], asked: Mapping[str, float]) -> int:
    return min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in asked.items())


@contextmanager
def requested(bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Ask the cluster's autoscaler, if there is one, for nodes with room for all bundles.

    The request is a pending placement group. It ends with its process and leaves other requests
    alone, unlike ``ray.autoscaler.sdk.request_resources``.
    """
    group = placement_group([dict(each) for each in bundles])
    try:
        yield
    finally:
        remove_placement_group(group)


def of_a_worker(job: TrainingJob) -> tuple[float, float]:
    """Return the CPUs (with those of loader processes) and GPUs of a worker.

    A measured trial has its GPUs to itself.
    """
    cpus, gpus = cpus_of_a_worker(job.settings), job.settings.scaling.gpus_per_worker or 0.0
    return cpus, max(1.0, gpus) if gpus and job.measured else gpus


def claim_of(job: TrainingJob, *, alone: bool = False) -> Claim:
    """Return what the workers hold; an elastic group, as many as there is room for.

    ``alone`` is for trials whose speed is measured: on CPUs they have their nodes to themselves.
    """
    cpus, gpus = of_a_worker(job)
    scaling = job.settings.scaling
    workers = max(scaling.fewest_workers, min(scaling.most_workers, room(cpus, gpus)))
    return Claim(bundle(cpus, gpus), workers, workers, alone=alone and not gpus)


def await_nodes(
    unit: str,
    bundles: Sequence[Mapping[str, float]],
    enough: Callable[[], bool],
    say: Callable[[str], None],
    pause: Callable[[float], None],
    reason: str = "nodes were lost",
) -> None:
    """Wait up to ten minutes until ``enough()``, and request nodes for the bundles.

    ``reason`` is shown once.

    Raises:
        UnitError: no node is left.
        KeyboardInterrupt: raised by ``pause``, which sleeps.

    """
    deadline = time.monotonic() + WAIT_FOR_NODES_S
    say(f"{reason}; waiting up to {WAIT_FOR_NODES_S / 60:.0f} minutes for others")
    with requested(bundles):
        while not enough() and time.monotonic() < deadline:
            check_alive(unit)
            pause(_POLL_S)
