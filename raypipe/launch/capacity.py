"""Cluster capacity, and how concurrent stages share it.

Ray waits forever for resources that no node has, and gives free resources to the next task even
while a training group waits for more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from raypipe.errors import UnitError
from raypipe.training.job import TrainingJob

#: custom resource, one per CPU: if any node has it, CPU tasks run on such nodes only
TASKS = "raypipe_tasks"
#: seconds; spot instances return within minutes or not at all
WAIT_FOR_NODES_S = 600.0
_POLL_S = 0.5


def living_nodes() -> dict[str, Mapping[str, float]]:
    """Return the resources of each living node by node ID."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


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
    scaling, processes = job.settings.scaling, job.settings.loader.workers
    cpus = scaling.cpus_per_worker + (processes if isinstance(processes, int) else 0)
    gpus = scaling.gpus_per_worker or 0.0
    return cpus, max(1.0, gpus) if gpus and job.measured else gpus


def of_a_group(job: TrainingJob) -> float:
    """Return the CPUs of all workers; for an elastic group, of as many as there is room for."""
    cpus, gpus = of_a_worker(job)
    scaling = job.settings.scaling
    return cpus * max(scaling.fewest_workers, min(scaling.most_workers, room(cpus, gpus)))


class Shared:
    """State shared by concurrent stages: the cluster's CPUs, and the request to stop.

    Trainings, trials and GPU tasks come first: CPU tasks leave the CPUs that these hold or wait
    for. A thread never waits for itself. CPUs are counted over all nodes: on several nodes, the
    CPUs that a worker waits for may first become free on different ones.

    Args:
        nodes: the nodes at the start; lost ones may return.

    """

    def __init__(self, nodes: Iterable[Mapping[str, float]] = ()) -> None:
        self.nodes = tuple(nodes)
        self._lock = threading.Lock()
        self._interrupted = threading.Event()
        # by thread and owner
        self._wanted: dict[tuple[int, object], float] = {}
        self._used: dict[tuple[int, object], float] = {}

    def hold(self, owner: object, cpus: float) -> bool:
        """Whether ``owner`` got its CPUs; if not, CPU tasks of other threads free them."""
        key = threading.get_ident(), owner
        with self._lock:
            self._wanted[key] = cpus
            others = _of_others(self._used)
            if others and others + cpus > _all_cpus() + 1e-9:
                return False
            self._used[key] = cpus
            return True

    def release(self, owner: object) -> None:
        """Release the CPUs that this thread held or used for ``owner``."""
        key = threading.get_ident(), owner
        with self._lock:
            self._wanted.pop(key, None)
            self._used.pop(key, None)

    @contextmanager
    def held(self, cpus: float, say: Callable[[str], None] | None = None) -> Iterator[None]:
        """Wait for CPUs and hold them in the body. Raises KeyboardInterrupt."""
        owner = object()
        try:
            if not self.hold(owner, cpus):
                if say is not None:
                    say(f"waits for {cpus:g} CPUs that another stage uses")
                while not self.hold(owner, cpus):
                    self.pause(_POLL_S)
            yield
        finally:
            self.release(owner)

    def use(self, owner: object, cpus: float) -> None:
        """Record the CPUs of the running CPU tasks of ``owner``."""
        with self._lock:
            self._used[threading.get_ident(), owner] = cpus

    def left(self) -> float | None:
        """Return the CPUs left for this thread's CPU tasks; None if no other stage wants any."""
        with self._lock:
            wanted = _of_others(self._wanted)
        return _all_cpus() - wanted if wanted else None

    def await_nodes(
        self,
        unit: str,
        bundles: Sequence[Mapping[str, float]],
        enough: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """Wait up to ten minutes until ``enough()``, and request nodes for the bundles.

        Raises:
            UnitError: no node is left.
            KeyboardInterrupt: the run is interrupted.

        """
        deadline = time.monotonic() + WAIT_FOR_NODES_S
        say(f"nodes were lost; waiting up to {WAIT_FOR_NODES_S / 60:.0f} minutes for others")
        with requested(bundles):
            while not enough() and time.monotonic() < deadline:
                check_alive(unit)
                self.pause(_POLL_S)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every current and later ``pause``."""
        self._interrupted.set()

    def pause(self, seconds: float = 0) -> None:
        """Sleep. Raises KeyboardInterrupt after ``interrupt``."""
        if self._interrupted.wait(seconds):
            raise KeyboardInterrupt


def _of_others(cpus: Mapping[tuple[int, object], float]) -> float:
    me = threading.get_ident()
    return sum(number for (thread, _), number in cpus.items() if thread != me)


def _all_cpus() -> float:
    return sum(node.get("CPU", 0.0) for node in living_nodes().values())
