"""Classification of failures from what Ray and its workers report. Torch is imported late."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import get_args

from ray.exceptions import (
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

from raypipe.errors import FailureKind, UnitError, message_of
from raypipe.launch.nodes import NODE_GONE, answers, living_nodes

_POLL_S = 0.5
# seconds after which Ray declares a silent node dead
_NODE_VERDICT_S = 40.0
_PROBE_S = 5.0

# messages of gloo and NCCL on workers that survive a peer
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
)


def kind_of(error: BaseException) -> FailureKind | None:
    """Return the kind of a failure that Ray reports; None for an exception of what it ran."""
    if isinstance(error, OutOfMemoryError):
        return "host_out_of_memory"
    if isinstance(error, NODE_GONE) or getattr(error, "preempted", False):
        return "node_lost"
    if isinstance(error, RayActorError) and "its node has died" in str(error):
        return "node_lost"
    if isinstance(error, RayActorError | WorkerCrashedError):
        return "worker_died"
    is_rays = type(error).__module__.startswith("ray.")
    return "timeout" if is_rays and "Timeout" in type(error).__name__ else None


def worker_failure(unit: str, error: BaseException) -> UnitError:
    """Return an exception of this worker as a UnitError; call it in the worker."""
    from raypipe.training.failure_kinds import unit_error

    failure = unit_error(unit, error)
    if failure is error:  # already classified
        return failure
    if failure.kind == "error" and any(sign in failure.message for sign in _LOST_PEER):
        # Ray ends the group, and with it this sleep, once it knows which worker died
        time.sleep(_NODE_VERDICT_S)
        failure = UnitError(unit, "worker_died", failure.message)
    return failure


def group_failure(unit: str, error: BaseException, nodes: Collection[str]) -> UnitError:
    """Return the failure of a training, the most telling one of its workers on these nodes."""
    causes = list(getattr(error, "worker_failures", {}).values()) or [error]
    failures = [_classified(unit, cause) for cause in causes]
    worst = min(failures, key=lambda failure: get_args(FailureKind).index(failure.kind))
    if worst.kind == "worker_died" and is_node_gone(nodes):
        return UnitError(unit, "node_lost", f"a node of the cluster was lost: {worst.message}")
    return worst


def _classified(unit: str, error: BaseException) -> UnitError:
    """Return the failure of a worker: the first recognized error in its chain of causes."""
    from raypipe.training.failure_kinds import failure_kind

    for cause in _causes(error):
        if isinstance(cause, UnitError):
            return UnitError(unit, cause.kind, cause.message, cause.limit, cause.trace)
        if (kind := kind_of(cause)) is not None:
            return UnitError(unit, kind, str(cause))
    message = message_of(cause)
    if type(error).__name__ == "ControllerError":  # `ray.train` is slow to import
        message = f"the worker group does not start: {message}"
    return UnitError(unit, failure_kind(cause), message)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: Ray's errors of trainings keep theirs in their attributes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        kept = (value for value in vars(cause).values() if isinstance(value, BaseException))
        cause = next(kept, cause.__cause__)


def is_node_gone(nodes: Collection[str]) -> bool:
    """Whether one of these nodes died; Ray reports it some time after its workers."""
    deadline = time.monotonic() + _NODE_VERDICT_S
    while set(nodes) <= living_nodes().keys():
        with suppress(RayError):
            answered = answers(nodes, lambda: None, timeout_s=_PROBE_S, max_retries=0)
            if len(answered) == len(nodes):
                return False
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
