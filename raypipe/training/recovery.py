"""A training run to its end: restarts after a death, a smaller micro-batch after no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raypipe.errors import UnitError
from raypipe.training.batching import BatchPlan
from raypipe.training.loop import TrainingJob

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
    and so the loss curve, stay the same. A dead worker is replaced ``max_restarts`` times.

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
            plan: BatchPlan | None = job.plan
            if error.kind == "out_of_memory":
                plan = job.plan.halved()
            elif error.kind in _WORTH_A_RESTART and deaths < job.settings.max_restarts:
                deaths += 1
            else:
                plan = None
            if plan is None:
                on_failure(job, error, "gave up")
                raise
            what = f"again with micro-batch {plan.micro_batch} x accumulation {plan.accumulation}"
            on_failure(job, error, what)
            job = replace(job, plan=plan, attempt=job.attempt + 1)
