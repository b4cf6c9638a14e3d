"""Classification of worker-group failures from what Ray and its workers report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import FailureKind, UnitError, message_of
from raypipe.launch.nodes import living_nodes
from raypipe.training.job import TrainingJob
from raypipe.training.oom import failure_kind, unit_error

_POLL_S = 0.5
# seconds after which Ray declares a silent node dead
_NODE_VERDICT_S = 40.0
_PROBE_S = 5.0
#: bytes of the end of a worker's log in which the cause of its death is looked for
_LOG_END = 20_000

# messages of gloo and NCCL on workers that survive a peer
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
)
_NODE_GONE = (ray.exceptions.NodeDiedError, ray.exceptions.ActorUnschedulableError)
_DIED = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)
# a cause is listed before its consequences on other ranks
_MOST_TELLING: tuple[FailureKind, ...] = (
    "out_of_memory",
    "host_out_of_memory",
    "invalid_value",
    "compile_error",
    "error",
    "timeout",
    "worker_hung",
    "node_lost",
    "worker_died",
)


def worker_failure(unit: str, error: BaseException) -> UnitError:
    """Return an exception of this worker as a UnitError; call it in the worker."""
    failure = unit_error(unit, error)
    if failure is error:  # already classified
        return failure
    if failure.kind == "error" and any(sign in failure.message for sign in _LOST_PEER):
        # Ray ends the group, and with it this sleep, once it knows which worker died
        time.sleep(_NODE_VERDICT_S)
        failure = UnitError(unit, "worker_died", failure.message)
    return failure


def log_sizes(job: TrainingJob) -> dict[str, int]:
    """Return the size in bytes of the log of each worker of a group, by path; 0 if missing."""
    run, workers = job.run_dir, job.settings.scaling.most_workers
    found = run.sizes(run.logs) if workers > 1 else {}
    names = [job.trial_id, *(f"{job.trial_id}-{rank}" for rank in range(1, workers))]
    paths = [run.log(name) for name in names]
    return {path: found.get(path.rpartition("/")[2], 0) for path in paths}


def explained(job: TrainingJob, failure: UnitError, before: Mapping[str, int]) -> UnitError:
    """Return the failure of a job, with the cause in the logs of its workers if it is there.

    NCCL's watchdog ends the process of a worker whose exchange exceeds its time limit, and only
    the log says so.

    Args:
        job: the job.
        failure: what Ray reports.
        before: the sizes of the logs when the job started.

    """
    message, limit = failure.message, failure.limit
    found = UnitError(job.trial_id, failure.kind, message, limit, failure.trace)
    if failure.kind != "worker_died":
        return found
    for path, size in log_sizes(job).items():
        if size > before.get(path, 0):
            end = job.run_dir.read(path)[before.get(path, 0) :][-_LOG_END:]
            for line in end.decode(errors="replace").splitlines():
                if failure_kind(said := RuntimeError(line)) == "worker_hung":
                    return unit_error(job.trial_id, said)
    return found


def group_failure(unit: str, error: Exception, nodes: set[str]) -> UnitError:
    """Return the most informative worker failure of a group that started on these nodes."""
    causes = list(getattr(error, "worker_failures", {}).values()) or [error]
    failures = [_classify(unit, cause) for cause in causes]
    worst = min(failures, key=lambda failure: _MOST_TELLING.index(failure.kind))
    if worst.kind == "worker_died" and is_node_gone(nodes):
        return UnitError(unit, "node_lost", f"a node of the cluster was lost: {worst.message}")
    return worst


def _classify(unit: str, error: BaseException) -> UnitError:
    """Return the failure of a worker: the first recognized error in its chain of causes."""
    for seen in _causes(error):
        if isinstance(seen, UnitError):
            return UnitError(unit, seen.kind, seen.message, seen.limit, seen.trace)
        kind: FailureKind | None = None
        if isinstance(seen, ray.exceptions.OutOfMemoryError):
            kind = "host_out_of_memory"
        elif isinstance(seen, _NODE_GONE) or getattr(seen, "preempted", False):
            kind = "node_lost"
        elif isinstance(seen, _DIED):
            kind = "worker_died"
        elif _is_rays(seen) and "Timeout" in type(seen).__name__:
            kind = "timeout"
        if kind is not None:
            return UnitError(unit, kind, str(seen))
    *_, first = _causes(error)
    message = message_of(first)
    if type(error).__name__ == "ControllerError":  # `ray.train` is slow to import
        message = f"the worker group does not start: {message}"
    return UnitError(unit, failure_kind(first), message)


def _is_rays(error: BaseException) -> bool:
    return type(error).__module__.startswith("ray.")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: Ray's errors of trainings keep theirs in their attributes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        kept = (each for each in vars(seen).values() if isinstance(each, BaseException))
        seen = next(kept, seen.__cause__)


def is_node_gone(nodes: set[str]) -> bool:
    """Whether one of these nodes died; Ray reports it some time after its workers."""
    deadline = time.monotonic() + _NODE_VERDICT_S
    while nodes <= living_nodes().keys():
        if time.monotonic() > deadline or _answer(nodes):
            return False
        time.sleep(_POLL_S)
    return True


def _answer(nodes: set[str]) -> bool:
    """Whether every node still runs a task."""
    probe = ray.remote(num_cpus=0, max_retries=0)(_nothing)
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    tasks = [probe.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    _, silent = ray.wait(tasks, num_returns=len(tasks), timeout=_PROBE_S)
    if silent:
        return False
    try:
        ray.get(tasks)
    except ray.exceptions.RayError:
        return False
    return True


def _nothing() -> None:
    pass
