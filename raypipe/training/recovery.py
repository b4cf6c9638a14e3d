"""Run a training job to completion: restart after failures, shrink the batch after OOM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from raypipe.errors import TRANSIENT, UnitError
from raypipe.training.batching import BatchPlan
from raypipe.training.checkpoint import CheckpointStore
from raypipe.training.job import TrainingJob, schedule_trace
from raypipe.training.settings import OomStep

#: starts the workers in fresh processes and returns the result of ``loop.train`` on rank 0
Launch = Callable[[TrainingJob], dict[str, Any]]
_Section = Literal["training", "scaling"]
_CHANGES: Mapping[OomStep, tuple[_Section, str, Any]] = {
    "gradient_checkpointing": ("training", "gradient_checkpointing", True),
    "fsdp": ("scaling", "strategy", "fsdp"),
    "bf16": ("training", "precision", "bf16"),
}
#: receives each failed attempt: the job, the error, and the next action as text
OnFailure = Callable[[TrainingJob, UnitError, str], None]


def train_to_the_end(
    job: TrainingJob, launch: Launch, on_failure: OnFailure
) -> tuple[TrainingJob, dict[str, Any]]:
    """Run a job to completion; each attempt starts from the newest checkpoint.

    If the GPU runs out of memory, halve the micro-batch and raise the accumulation: the effective
    batch, and therefore the loss curve, stay the same. At micro-batch 1 apply the steps of
    ``on_oom``, one per attempt, each as long as it lowers the need. If an evaluation runs out of
    memory, halve only its batch. If compiling fails, train without. After a lost worker or node, or
    out of host memory, restart up to ``max_restarts`` times.

    Returns:
        The job of the attempt that succeeded and its outcome.

    Raises:
        UnitError: the last attempt failed.

    """
    deaths = 0
    while True:
        try:
            return job, launch(job)
        except UnitError as error:
            change: tuple[TrainingJob, str] | None = None
            if error.kind == "out_of_memory":
                change = _smaller(job, error)
            elif error.kind == "compile_error":
                text = "again without training.compile"
                change = _changed(job, "training", "compile", False, text)
            elif error.kind in TRANSIENT and deaths < job.settings.max_restarts:
                deaths += 1
                change = job, "again from the last checkpoint"
            on_failure(job, error, "gave up" if change is None else change[1])
            if change is None:
                raise
            job = replace(change[0], attempt=job.attempt + 1)


def check_state(job: TrainingJob) -> None:
    """Raise UnitError if no checkpoint of a finished training is stored that a job continues."""
    if not CheckpointStore(job.run_dir, job.trial_id).has(schedule_trace(job, job.phases)):
        raise UnitError(job.trial_id, "error", lost_state(job))


def lost_state(job: TrainingJob) -> str:
    """Return the message for a finished training that cannot be continued."""
    return (
        "the state in which the stored training ended is missing in "
        f"{job.run_dir.checkpoints(job.trial_id)}, or its schedule is not the beginning of the "
        "longer one; use another --run-dir to train from the first step on"
    )


def _changed(
    job: TrainingJob, section: _Section, key: str, value: Any, text: str
) -> tuple[TrainingJob, str] | None:
    """Return the job with another setting, and the text; None if it had this one."""
    values = getattr(job.settings, section)
    if getattr(values, key) == value:
        return None
    return replace(job, settings=job.settings.changed(section, **{key: value})), text


def _smaller(job: TrainingJob, error: UnitError) -> tuple[TrainingJob, str] | None:
    """Return the job with the next lower memory need and a description; None if there is none."""
    limit = error.limit
    if limit is not None and limit.where == "evaluation":
        size = limit.size // 2
        change = replace(job, eval_batch=size), f"again with evaluation batch {size}"
        return change if size else None
    plan: BatchPlan | None = job.plan.halved()
    # a phase with fewer samples has smaller micro-batches: halve until these shrink, too
    while plan is not None and limit is not None and plan.micro_batch >= limit.size:
        plan = plan.halved()
    if plan is not None:
        what = f"again with micro-batch {plan.micro_batch} x accumulation {plan.accumulation}"
        return replace(job, plan=plan), what
    for step in job.settings.on_oom:
        if step == "shorten":
            shorter = job.task.shortened()
            lower = shorter and (replace(job, task=shorter[0]), f"again with {shorter[1]}")
        else:
            lower = _changed(job, *_CHANGES[step], f"again with {step}")
        if lower is not None:
            return lower
    return None
