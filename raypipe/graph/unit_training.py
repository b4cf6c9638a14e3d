"""Training of a unit: its job, its launch with restarts, and the record of the trial."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypipe.errors import UnitError
from raypipe.graph.context import StageContext
from raypipe.graph.continuation import CONTINUED, is_continued
from raypipe.graph.experiment import Unit
from raypipe.graph.identity import fingerprint
from raypipe.graph.unit_logs import Failure
from raypipe.hardware import bytes_text
from raypipe.provenance import now
from raypipe.store.ledger import Row

if TYPE_CHECKING:
    from raypipe.training.initial_weights import InitialWeights
    from raypipe.training.job import TrainingJob
    from raypipe.training.monitor import MonitorSettings
    from raypipe.training.settings import TrainStageSettings
    from raypipe.training.task import JobTask

#: share of a step spent waiting for data below which nothing is said
_LEAST_WAIT = 0.01
#: held-out measures on the line of a training
_MOST_MEASURES = 2


def train(
    context: StageContext,
    unit: Unit,
    task: JobTask,
    settings: TrainStageSettings,
    initial: InitialWeights | None = None,
) -> None:
    """Train to completion and record the trial; the weights are at ``run_dir.model(key)``.

    Raises:
        UnitError: the last attempt failed; the trial and its failures are recorded.

    """
    from raypipe.training.checkpoint import CheckpointStore
    from raypipe.training.job import ExternalTask
    from raypipe.training.recovery import check_state, train_to_the_end

    job = job_of(context, unit, task, settings)
    job = replace(job, settings=job.settings.with_cpus(_cpus(context, job.settings)))
    goes_on = is_continued(context.ledger.get("units", unit.key), unit)
    job = replace(job, initial=initial, continues=goes_on)
    if goes_on:  # its model will replace the other's
        check_state(job)
        context.ledger.put_tables(context.records([unit], CONTINUED))
    resumed = context.run_dir.list(context.run_dir.checkpoints(unit.key))
    context.resumed = bool(resumed)
    trial = 0 if resumed else min(settings.memory_trial, job.steps)

    measures: dict[str, float] = {}

    def started() -> None:
        if context.began is None:
            context.began = now(), time.monotonic()
            context.begin(job.steps, done=_last_step(resumed))
            if job.settings.scaling.gpus_per_worker:
                context.say(_workers_text(job, context.device))

    def show(row: dict[str, Any]) -> None:
        context.session.trackers.log(job.trial_id, row)
        measures.update(_held_out(row, settings.training.monitor))
        note = _training_note(row, measures)
        context.advance(job.task.done(row, job.settings.training), note)

    def on_failure(job: TrainingJob, error: UnitError, outcome: str) -> None:
        about = error.kind, error.message, outcome, error.trace
        context.fail(Failure(unit.key, job.attempt, *about))
        context.record_trial(job, error.status, {})

    def launch(job: TrainingJob) -> dict[str, Any]:
        def report(row: dict[str, Any] | str) -> None:
            if isinstance(row, str):
                context.say(row)
            elif not job.measured:
                show(row)

        return context.session.launcher.train(job, report, started)

    if trial:
        asked = replace(job, measured=True, until=trial)
        tried, outcome = train_to_the_end(asked, launch, on_failure)
        peak = outcome.get("gpu_peak_bytes") or outcome["host_peak_bytes"]
        context.say(
            f"{trial} steps on the longest samples fit: micro-batch {tried.plan.micro_batch} x "
            f"accumulation {tried.plan.accumulation}, {bytes_text(peak)} at most"
        )
        job = replace(tried, measured=False, until=None)
    job, outcome = train_to_the_end(job, launch, on_failure)
    context.leased = outcome.pop("leased", None)
    context.gpu_peak_bytes = outcome.get("gpu_peak_bytes")
    context.record_trial(job, "succeeded", outcome)
    if (waited := outcome.get("loader_wait_share") or 0.0) >= _LEAST_WAIT:
        context.say(f"waiting for data: {100 * waited:.0f} % of the step")
    context.finish(unit)
    if not ((keep := job.settings.training.keep_state) and isinstance(job.task, ExternalTask)):
        CheckpointStore(context.run_dir, unit.key, pinned=job.stable_end).prune(int(keep))


def job_of(
    context: StageContext, unit: Unit, task: JobTask, settings: TrainStageSettings
) -> TrainingJob:
    """Return the training job of a unit on the available devices."""
    from raypipe.training.batching import BatchPlan
    from raypipe.training.job import ExternalTask, TrainingJob

    training = settings.training
    micro, accumulation = training.micro_batch, training.accumulation
    if (micro is None or accumulation is None) and not isinstance(task, ExternalTask):
        raise ValueError(f"{unit.key}: the batch sizes were not resolved")
    micro, accumulation = micro or 1, accumulation or 1
    effective = training.effective_batch or micro * accumulation
    plan = BatchPlan(micro, accumulation, effective, settings.scaling.most_workers)
    gpus = [gpu.name for node in context.session.nodes for gpu in node.gpus]
    settings = settings.with_gpus(len(gpus))
    if settings.scaling.workers == "auto":
        settings = settings.with_workers(_workers(context, settings, plan.effective_batch))
        plan = plan.for_workers(settings.scaling.most_workers)
    context.device = gpus[0] if gpus and settings.scaling.gpus_per_worker else "cpu"
    steps = context.session.tables["steps"]
    trial_id = context.run_dir.trial_id(unit.key)
    identity = fingerprint([unit.fingerprint, unit.extents])
    return TrainingJob(
        trial_id,
        context.session.run_id,
        task,
        task.placed(settings),
        plan,
        context.run_dir,
        steps,
        identity=identity,
    )


def _workers(context: StageContext, settings: TrainStageSettings, effective_batch: int) -> int:
    """Return the number of workers of ``scaling.workers: auto``."""
    from raypipe.training.requirements import automatic_workers

    if not context.session.launcher.concurrent:  # in this process
        return 1
    others = sum(stage.training is not None and stage.on_gpu for stage in context.beside())
    return automatic_workers(settings, effective_batch, context.session.nodes, 1 + others)


def _cpus(context: StageContext, settings: TrainStageSettings) -> float:
    """Return the CPUs of a worker, also for ``scaling.cpus_per_worker: auto``."""
    from raypipe.training.requirements import cpus_of_a_worker

    scaling = settings.scaling
    if scaling.cpus_per_worker != "auto" or scaling.gpus_per_worker:
        return scaling.reserved_cpus
    fewest = min(node.cpus for node in context.session.nodes)
    if not context.session.launcher.concurrent:
        return max(1.0, fewest)
    loaders = cpus_of_a_worker(settings) - scaling.reserved_cpus
    share = fewest // (1 + len(context.beside())) // scaling.most_workers
    return max(1.0, share - loaders)


def _last_step(checkpoints: Iterable[str]) -> int:
    """Return the step of the newest checkpoint by its name, 0 without any."""
    numbers = (name.removeprefix("step_") for name in checkpoints)
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _held_out(row: Row, monitor: MonitorSettings | None) -> dict[str, float]:
    """Return the held-out measures of a logged step by their short names, the monitored first."""
    found = {
        name.removeprefix("eval_"): value
        for name, value in row.items()
        if name.startswith("eval_") and isinstance(value, int | float)
    }
    first = monitor.metric if monitor is not None else None
    return dict(sorted(found.items(), key=lambda item: item[0] != first))  # stable


def _training_note(row: Row, measures: Mapping[str, float]) -> str:
    """Return the state of a training, as far as it is known, the most important first."""
    loss, rate, speed = (row.get(name) for name in ("loss", "lr", "samples_per_s"))
    parts = [] if loss is None else [f"loss {loss:.4g}"]
    parts += [f"eval {name} {value:.4g}" for name, value in [*measures.items()][:_MOST_MEASURES]]
    parts += [] if rate is None else [f"lr {rate:.2g}"]
    return "  ".join(parts if speed is None else [*parts, f"{speed:.3g} samples/s"])


def _workers_text(job: TrainingJob, device: str) -> str:
    """Return the workers of a training and the batch that they share, as far as it is known."""
    plan, training = job.plan, job.settings.training
    text = f"{plan.workers} worker{'s' * (plan.workers != 1)} on {device}"
    if training.effective_batch is not None:
        text += f", effective batch {plan.effective_batch}"
    if training.micro_batch is not None:
        text += f" of at most {plan.micro_batch} x {plan.accumulation} x {plan.workers}"
    return text
