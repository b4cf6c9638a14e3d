"""A training job in a worker group of its own."""

from __future__ import annotations

import time
from typing import Any

import ray

from raypipe.errors import FailureKind, UnitError
from raypipe.launch.capacity import Shared, check_alive, living_nodes, room
from raypipe.launch.failures import group_failure
from raypipe.launch.group import WorkerGroup, follow
from raypipe.training.job import Report, TrainingJob

_POLL_S = 0.5
# spot machines come back in minutes or not at all
_WAIT_FOR_NODES_S = 600.0


def fit(job: TrainingJob, report: Report, shared: Shared) -> dict[str, Any]:
    """Run a training job once, in fresh processes, and return what rank 0 returned.

    A later attempt than the first waits for nodes that were lost.

    Raises:
        UnitError: no room for the workers, or one failed or died, with the kind of failure.
        KeyboardInterrupt: the run is interrupted.

    """
    scaling = job.settings.scaling
    _await_room(job, scaling.cpus_per_worker, scaling.gpus_per_worker or 0.0, report, shared)
    nodes = set(living_nodes())
    try:
        group = WorkerGroup(job)
        try:
            return follow(group.relay, job, report, shared.pause)
        finally:
            group.close()
    except ray.exceptions.RayError as error:  # what the group talks through died, too
        raise group_failure(job.trial_id, error, nodes) from error


def _await_room(job: TrainingJob, cpus: float, gpus: float, report: Report, shared: Shared) -> None:
    """Raises UnitError where the workers have no room, for Ray would wait for ever.

    A later attempt than the first had room: it waits for the nodes to come back.
    """
    wanted = job.settings.scaling.fewest_workers
    deadline = time.monotonic() + (_WAIT_FOR_NODES_S if job.attempt > 1 else 0)
    told = False
    while (has := room(cpus, gpus)) < wanted:
        check_alive(job.trial_id)
        lack = (
            f"scaling.workers: {wanted} worker(s) of {cpus:g} CPUs and {gpus:g} GPUs each are "
            f"asked for, and the cluster has room for {has}"
        )
        if time.monotonic() >= deadline:
            kind: FailureKind = "node_lost" if job.attempt > 1 else "error"
            raise UnitError(job.trial_id, kind, f"{lack}; lower one of the three or add nodes")
        if not told:
            report(f"{lack}; waiting up to {_WAIT_FOR_NODES_S / 60:.0f} minutes for nodes")
            told = True
        shared.pause(_POLL_S)
