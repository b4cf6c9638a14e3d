"""Single training job: run it in one worker or a group, which may go on with the next job."""

from __future__ import annotations

from typing import Any, cast

import ray

from raypipe.errors import FailureKind, UnitError
from raypipe.launch.admission import Admission
from raypipe.launch.capacity import (
    await_nodes,
    bundle,
    check_alive,
    living_nodes,
    may_grow,
    of_a_worker,
    room,
)
from raypipe.launch.failures import group_failure
from raypipe.launch.group import WorkerGroup, follow
from raypipe.launch.solo import SoloWorker
from raypipe.pipeline.allocator import Lease
from raypipe.training.job import Report, TrainingJob


def fit(job: TrainingJob, report: Report, admission: Admission, lease: Lease) -> dict[str, Any]:
    """Run a training job once and return rank 0's result.

    It runs in new processes, or on CPUs in those of a training that ended well and whose
    resources it takes over: starting processes takes longer than a small training.

    Raises:
        UnitError: a worker failed or died.
        KeyboardInterrupt: the run is interrupted.

    """
    nodes = set(living_nodes())

    def threads() -> int:
        admission.pause()
        return job.settings.scaling.threads or admission.threads(lease)

    try:
        workers = _workers(job, admission, lease)
        kept = False
        try:
            outcome = follow(workers.mailbox, job, report, threads)
            kept = workers.lasts(job) and admission.hand_over(lease, workers)
        finally:
            if not kept:
                workers.close()
    except ray.exceptions.RayError as error:  # the mailbox died
        raise group_failure(job.trial_id, error, nodes) from error
    return outcome


def _workers(job: TrainingJob, admission: Admission, lease: Lease) -> SoloWorker | WorkerGroup:
    """Return the workers that the lease took over if they can run the job, or new ones."""
    inherited = cast("SoloWorker | WorkerGroup | None", admission.inherited(lease))
    if inherited is not None:
        if inherited.serves(job):
            return inherited
        inherited.close()
    if job.settings.scaling.most_workers > 1:
        return WorkerGroup(job)
    (node,) = lease.processes
    worker = SoloWorker(job, node)
    try:
        worker.await_start(job.trial_id, admission)
    except BaseException:
        worker.close()
        raise
    return worker


def await_workers(job: TrainingJob, report: Report, admission: Admission) -> None:
    """Raise UnitError if the workers have no room: Ray would wait forever.

    If they had room before, or an autoscaler may add nodes, wait for them, up to a time limit.
    """
    cpus, gpus = of_a_worker(job)
    wanted = job.settings.scaling.fewest_workers
    lost = job.attempt > 1 or room(cpus, gpus, nodes=admission.nodes) >= wanted

    def enough() -> bool:
        return room(cpus, gpus) >= wanted

    if not enough() and (lost or may_grow()):
        bundles = [bundle(cpus, gpus)] * wanted
        reason = "nodes were lost"
        if not lost:
            size = f"{wanted} worker(s) of {cpus:g} CPUs and {gpus:g} GPUs each"
            has = room(cpus, gpus)
            reason = f"needs {size}; the cluster has room for {has} and may grow"
        await_nodes(job.trial_id, bundles, enough, report, admission.pause, reason)
    check_alive(job.trial_id)
    if (has := room(cpus, gpus)) < wanted:
        kind: FailureKind = "node_lost" if lost else "error"
        raise UnitError(
            job.trial_id,
            kind,
            f"scaling.workers: {wanted} worker(s) of {cpus:g} CPUs and {gpus:g} GPUs each were "
            f"requested, but the cluster has room for {has}; lower one of the three or add nodes",
        )
