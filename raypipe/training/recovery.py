"""Run a training job to completion: restart after failures, shrink the batch after OOM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raypipe.errors import UnitError
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.settings import OomStep

#: starts the workers, in fresh processes, and returns what ``loop.train`` returned on rank 0
Launch = Callable[[TrainingJob], dict[str, Any]]
#: what a failed attempt is told to: the attempt, the error, what happens next
OnFailure = Callable[[TrainingJob, UnitError, str], None]

_WORTH_A_RESTART = ("worker_died", "node_lost", "host_out_of_memory")


def train_to_the_end(
    job: TrainingJob, launch: Launch, on_failure: OnFailure
) -> tuple[TrainingJob, dict[str, Any]]:
    """Launch a run until it ends, each attempt from the newest checkpoint.

    Out of GPU memory halves the micro-batch and raises the accumulation: the effective batch,
    and so the loss curve, stay the same. At micro-batch 1 the steps of ``on_oom`` follow, one
    an attempt, each as often as it changes anything. Out of memory in an evaluation halves its
    batch only. A dead worker is replaced ``max_restarts`` times.

    Returns:
        The job of the attempt that succeeded and its outcome.

    Raises:
        UnitError: of the last attempt.

    """
    deaths = 0
    while True:
        try:
            return job, launch(job)
        except UnitError as error:
            change: tuple[TrainingJob, str] | None = None
            if error.kind == "out_of_memory":
                change = _smaller(job, error)
            elif error.kind in _WORTH_A_RESTART and deaths < job.settings.max_restarts:
                deaths += 1
                change = job, "again from the last checkpoint"
            if change is None:
                on_failure(job, error, "gave up")
                raise
            on_failure(job, error, change[1])
            job = replace(change[0], attempt=job.attempt + 1)


def _smaller(job: TrainingJob, error: UnitError) -> tuple[TrainingJob, str] | None:
    """The job with the next smaller need of memory, and what it is; None where there is none."""
    limit = error.limit
    if limit is not None and limit.where == "evaluation":
        if limit.size == 1:
            return None
        size = limit.size // 2
        return replace(job, eval_batch=size), f"again with evaluation batch {size}"
    plan: BatchPlan | None = job.plan.halved()
    # a phase with a smaller batch takes smaller micro-batches: halve until it gets less, too
    while plan is not None and limit is not None and plan.micro_batch >= limit.size > 1:
        plan = plan.halved()
    if plan is not None and (limit is None or limit.size > 1):
        what = f"again with micro-batch {plan.micro_batch} x accumulation {plan.accumulation}"
        return replace(job, plan=plan), what
    return next(filter(None, (_changed(job, step) for step in job.settings.on_oom)), None)


def _changed(job: TrainingJob, step: OomStep) -> tuple[TrainingJob, str] | None:
    """The job after a step of ``on_oom``; None where that changes nothing any more."""
    if step == "shorten":
        shorter = job.task.shortened()
        return shorter and (replace(job, task=shorter[0]), f"again with {shorter[1]}")
    training, scaling = job.settings.training, job.settings.scaling
    if step == "gradient_checkpointing":
        training = training.model_copy(update={"gradient_checkpointing": True})
    elif step == "fsdp":
        scaling = scaling.model_copy(update={"strategy": "fsdp"})
    else:
        training = training.model_copy(update={"precision": "bf16"})
    settings = job.settings.model_copy(update={"training": training, "scaling": scaling})
    if settings == job.settings:
        return None
    return replace(job, settings=settings), f"again with {step}"
