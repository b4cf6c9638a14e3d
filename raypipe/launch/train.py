"""Single training job: run it in one worker or a group, which may go on with the next job."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import cloudpickle

from raypipe.errors import FailureKind, PreemptionError, UnitError
from raypipe.launch.admission import Admission
from raypipe.launch.capacity import (
    await_nodes,
    bundle,
    check_alive,
    draining_nodes,
    living_nodes,
    may_grow,
    of_a_worker,
    room,
)
from raypipe.launch.failures import explained, group_failure, log_sizes
from raypipe.launch.job_mailbox import Progress
from raypipe.launch.solo import SoloWorker
from raypipe.pipeline.allocator import Lease
from raypipe.training.job import Report, TrainingJob

if TYPE_CHECKING:
    from raypipe.launch.group import WorkerGroup

_POLL_S = 0.5


def fit(job: TrainingJob, report: Report, admission: Admission, lease: Lease) -> dict[str, Any]:
    """Run a training job once and return rank 0's result.

    It runs in new processes, or on CPUs in those of a training that ended well and whose
    resources it takes over: starting processes takes longer than a small training.

    Raises:
        UnitError: a worker failed or died.
        PreemptionError: a node of its workers will be lost; a checkpoint is saved.
        KeyboardInterrupt: the run is interrupted, or has come to its end with a checkpoint.

    """
    nodes = set(living_nodes())

    def threads() -> int:
        admission.pause()
        return job.settings.scaling.threads or admission.threads(lease)

    def ends(progress: Progress) -> bool:
        admission.expect(lease, progress.ending_s)
        return admission.is_winding_down or not progress.nodes.isdisjoint(draining_nodes())

    try:
        workers = _workers(job, admission, lease)
        kept = False
        try:
            outcome = follow(workers.mailbox, job, report, threads, ends)
            whole = "ended_at" not in outcome
            kept = whole and workers.lasts(job) and admission.hand_over(lease, workers)
        finally:
            if not kept:
                workers.close()
    except ray.exceptions.RayError as error:  # the mailbox died
        raise group_failure(job.trial_id, error, nodes) from error
    if not whole:
        if admission.is_winding_down:
            admission.await_interruption(lease)
        raise PreemptionError(job.trial_id, outcome["ended_at"])
    return outcome


def follow(
    mailbox: Any,
    job: TrainingJob,
    report: Report,
    threads: Callable[[], int],
    ends: Callable[[Progress], bool] = lambda _: False,
) -> dict[str, Any]:
    """Submit a job to its workers, forward its progress, and return rank 0's result.

    Args:
        mailbox: the actor between the driver and the workers.
        job: the job.
        report: receives the progress.
        threads: returns the number of threads that each worker should compute with. It is called
            about twice per second and may raise to end the wait.
        ends: whether the workers should save a checkpoint and end early; called as often.

    Raises:
        UnitError: a worker failed or died, with the kind of failure.

    """
    logs = log_sizes(job)
    name, pickled = f"{job.trial_id}-{secrets.token_hex(4)}", cloudpickle.dumps(job)
    ray.get(mailbox.submit.remote(name, pickled, threads()))
    end = False
    while True:
        progress: Progress = ray.get(mailbox.drain.remote(_POLL_S, threads(), end))
        if progress.job != name:  # Ray's OOM killer ended the mailbox; it restarted
            ray.get(mailbox.submit.remote(name, pickled, threads()))
        for each in progress.rows:
            report(each)
        if progress.outcome is not None:
            return progress.outcome
        if (failure := progress.failure) is not None:
            raise explained(job, failure, logs)
        end = end or ends(progress)


def _workers(job: TrainingJob, admission: Admission, lease: Lease) -> SoloWorker | WorkerGroup:
    """Return the workers that the lease took over if they can run the job, or new ones."""
    inherited = cast("SoloWorker | WorkerGroup | None", admission.inherited(lease))
    if inherited is not None:
        if inherited.serves(job):
            return inherited
        inherited.close()
    if job.settings.scaling.most_workers > 1:
        from raypipe.launch.group import WorkerGroup  # slow to import, and seldom needed

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
