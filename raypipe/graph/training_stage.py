"""Stages common to all experiments: the hardware check and the training run.

A training has a job, a launch with restarts, and a record of its trial.
"""

from __future__ import annotations

import logging
import time
from bdb import BdbQuit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from raypipe.errors import ConfigError, UnitError, message_of
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Stage, Training, Unit
from raypipe.graph.identity import fingerprint
from raypipe.graph.stored_results import CONTINUED, all_stored, is_continued
from raypipe.graph.unit_logs import Failure, brief
from raypipe.hardware import bytes_text
from raypipe.redaction import without_credentials
from raypipe.report.formatting import counted
from raypipe.report.results import monitors_of, training_measures
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.job import ExternalTask, JobTask, TrainingJob
from raypipe.training.settings import TrainStageSettings, automatic_workers
from raypipe.training.weights import find

log = logging.getLogger(__name__)
#: name of the stage that reports the hardware
HARDWARE = "hardware"
#: held-out measures on the line of a training
_MOST_MEASURES = 2


def hardware_stage() -> Stage:
    """Return the stage that reports each node's hardware; no GPU is a note, not a failure."""
    return Stage(HARDWARE, _report_hardware, reads=(), workload="a check of every node")


def _report_hardware(context: StageContext) -> None:
    for row in context.ledger.rows("environment"):
        if row["command_id"] != context.session.command_id:
            continue
        gpus = f"{row['gpu_count']} x {row['gpus']}" if row["gpus"] else "no GPU"
        context.say(
            f"{row['hostname']}: {gpus}, {row['cpus']} CPUs, "
            f"{bytes_text(row['memory_bytes'])}, torch {row['torch']}, "
            f"CUDA {row['cuda'] or 'none'}"
        )
        if row["gpus"]:
            context.device = row["gpus"]


def train_stage(
    name: str,
    settings: TrainStageSettings,
    build_task: Callable[[Any, RunDirectory | None], JobTask],
    needs: tuple[str, ...] = (),
    reads: tuple[str, ...] | None = None,
    literals: Mapping[str, Any] | None = None,
) -> Stage:
    """Return a training stage; its weights are at ``run_dir.model(name)`` afterwards.

    Args:
        name: the stage, and the section of the configuration that holds its settings.
        settings: that section.
        build_task: as in :class:`~raypipe.graph.experiment.Training`.
        needs: the stages before it.
        reads: as in :class:`~raypipe.graph.experiment.Stage`.
        literals: as in :class:`~raypipe.graph.experiment.Unit`.

    Raises:
        ConfigError: ``init_from`` names no model.

    """
    trained = settings.training
    joint = ", steps of" if trained.length_in == "epochs" else " of"
    length = f"{trained.length} {trained.length_in}{joint}"
    initial = None
    if trained.init_from is not None:
        initial = find(trained.init_from, name, f"{name}.training.init_from")
        literals = {**(literals or {}), "training.init_from": initial.sha256}
    training = Training(settings, build_task, initial=initial)
    unit = Unit(
        name,
        literals or {},
        budget=trained.length,
        budget_key=training.length_key(name),
        extensible=settings.fixed_by(trained.length) is None,
    )
    workload = f"{length} {trained.effective_batch} samples"
    on_gpu = settings.scaling.gpus_per_worker != 0
    return Stage(
        name, _train, [unit], needs, reads, workload=workload, training=training, on_gpu=on_gpu
    )


def _train(context: StageContext) -> None:
    if (training := context.stage.training) is None:
        raise ValueError(f"{context.stage.name} is not a training stage")
    train(context, context.stage.units[0], training)


def train(context: StageContext, unit: Unit, training: Training) -> None:
    """Train to completion and record the trial; the weights are at ``run_dir.model(key)``.

    Raises:
        UnitError: the last attempt failed; the trial and its failures are recorded.

    """
    from raypipe.training.checkpoint import CheckpointStore  # with torch, which is slow to import
    from raypipe.training.recovery import check_state, train_to_the_end

    settings, job = training.settings, job_of(context, unit, training, context.run_dir)
    job = with_cpus(context, job)
    goes_on = is_continued(context.ledger.get("units", unit.key), unit)
    job = replace(job, continues=goes_on)
    if goes_on:  # its model will replace the other's
        check_state(job)
        context.ledger.put_tables(context.records([unit], CONTINUED))
    resumed = context.run_dir.list(context.run_dir.checkpoints(unit.key))
    context.resumed = bool(resumed)
    trial = min(settings.memory_trial, job.steps)

    measures: dict[str, float] = {}
    monitor = settings.training.monitor
    monitored = monitor.metric if monitor is not None else None

    def started() -> None:
        if context.began is None:
            context.began = time.monotonic()
            context.begin(job.steps, done=_last_step(resumed))
            if job.settings.scaling.gpus_per_worker:
                context.say(_workers_text(job, context.device))

    def on_failure(job: TrainingJob, error: UnitError, outcome: str) -> None:
        about = error.kind, error.message, outcome, error.trace
        context.fail(Failure(unit.key, job.attempt, *about))
        context.record_trial(job, error.status, {})

    def launch(job: TrainingJob) -> dict[str, Any]:
        def report(row: dict[str, Any] | str) -> None:
            if isinstance(row, str):
                context.say(row)
            elif not job.measured:
                context.session.trackers.log(job.trial_id, row)
                measures.update(_held_out(row, monitored))
                note = _training_note(row, measures)
                context.advance(job.task.done(row, job.settings.training), note)

        return context.session.launcher.train(job, report, started)

    if trial and not resumed:
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
    context.result = _result(context, outcome)
    if percent := round(100 * (outcome.get("loader_wait_share") or 0)):
        context.say(f"waiting for data: {percent} % of the step")
    context.finish(unit)
    if not ((keep := job.settings.training.keep_state) and isinstance(job.task, ExternalTask)):
        CheckpointStore(context.run_dir, unit.key).prune(int(keep))


def job_of(
    context: StageContext, unit: Unit, training: Training, run_dir: RunDirectory | None
) -> TrainingJob:
    """Return the training job of a unit on the available devices.

    ``run_dir`` has the results of earlier stages; None before any of them ran.
    """
    settings, task = training.settings, training.task(run_dir)
    sizes = settings.training
    micro, accumulation = sizes.micro_batch or 1, sizes.accumulation or 1  # a script takes its own
    effective = sizes.effective_batch or micro * accumulation
    plan = BatchPlan(micro, accumulation, effective, settings.scaling.worker_count)
    gpus = context.session.gpus
    settings = settings.with_gpus(len(gpus))
    if settings.scaling.workers == "auto":
        workers = _workers(context, settings, plan.effective_batch)
        settings = settings.changed("scaling", workers=workers)
        plan = plan.for_workers(settings.scaling.worker_count)
    context.device = gpus[0] if gpus and settings.scaling.gpus_per_worker else "cpu"
    return TrainingJob(
        context.run_dir.trial_id(unit.key),
        context.session.run_id,
        task,
        task.placed(settings),
        plan,
        context.run_dir,
        context.session.tables["steps"],
        identity=fingerprint([unit.fingerprint, unit.extents]),
        initial=training.initial,
    )


def _workers(context: StageContext, settings: TrainStageSettings, effective_batch: int) -> int:
    """Return the number of workers of ``scaling.workers: auto``."""
    if not context.session.launcher.concurrent:  # in this process
        return 1
    others = sum(stage.training is not None and stage.on_gpu for stage in context.beside())
    return automatic_workers(settings, effective_batch, context.session.nodes, 1 + others)


def with_cpus(context: StageContext, job: TrainingJob) -> TrainingJob:
    """Return a job with the CPUs of a worker, also for ``scaling.cpus_per_worker: auto``.

    One whose speed is measured runs alone on a node, whichever stages are unfinished.
    """
    scaling, session = job.settings.scaling, context.session
    cpus = scaling.reserved_cpus
    if scaling.cpus_per_worker == "auto" and not scaling.gpus_per_worker:
        cpus = float(min(node.cpus for node in session.nodes))
        if session.launcher.concurrent:
            others = 0 if job.measured else len(context.beside())
            cpus = cpus // (1 + others) // scaling.worker_count - job.settings.loader.workers
        cpus = max(1.0, cpus)
    return replace(job, settings=job.settings.changed("scaling", cpus_per_worker=cpus))


def _last_step(checkpoints: Iterable[str]) -> int:
    """Return the step of the newest checkpoint by its name, 0 without any."""
    numbers = (name.removeprefix("step_") for name in checkpoints)
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _held_out(row: Row, monitored: str | None) -> dict[str, float]:
    """Return the held-out measures of a logged step by their short names, the monitored first."""
    found = {
        name.removeprefix("eval_"): value
        for name, value in row.items()
        if name.startswith("eval_") and isinstance(value, int | float)
    }
    return dict(sorted(found.items(), key=lambda item: item[0] != monitored))  # stable


def _training_note(row: Row, measures: Mapping[str, float]) -> str:
    """Return the state of a training, as far as it is known, the most important first."""
    loss, rate, speed = (row.get(name) for name in ("loss", "lr", "samples_per_s"))
    parts = [] if loss is None else [f"loss {loss:.4g}"]
    parts += [f"eval {name} {value:.4g}" for name, value in [*measures.items()][:_MOST_MEASURES]]
    parts += [] if rate is None else [f"lr {rate:.2g}"]
    return "  ".join(parts if speed is None else [*parts, f"{speed:.3g} samples/s"])


def _result(context: StageContext, outcome: Row) -> str:
    """Return the number that stands for a finished training, as in the report; empty without."""
    names = [name for name, value in outcome.items() if isinstance(value, int | float)]
    monitors = monitors_of(context.session.settings.model_dump())
    measures = training_measures(names, context.session.tables["trials"].columns, monitors)
    return f"{measures[0].name} {outcome[measures[0].name]:.4g}" if measures else ""


def _workers_text(job: TrainingJob, device: str) -> str:
    """Return the workers of a training and the batch that they share, as far as it is known."""
    plan, training = job.plan, job.settings.training
    text = f"{counted(plan.workers, 'worker')} on {device}"
    if training.effective_batch is not None:
        text += f", effective batch {plan.effective_batch}"
    if training.micro_batch is not None:
        text += f" of at most {plan.micro_batch} x {plan.accumulation} x {plan.workers}"
    return text


def check_initial_weights(
    run_dir: RunDirectory, ledger: Ledger, stages: Sequence[Stage], where: str
) -> None:
    """Reject unfinished trainings whose initial weights do not fit the model.

    Workers check models that cannot be built here, since their data do not exist yet.

    Raises:
        ConfigError: the mistake.

    """
    keyed = {stage.key: stage for stage in stages}
    for stage in stages:
        training, needs = stage.training, [keyed[key] for key in stage.needed_keys]
        if training is None or training.initial is None or all_stored([stage], ledger):
            continue
        if not all_stored(needs, ledger):
            continue
        import torch  # slow, and not needed without such trainings

        try:
            with torch.device("meta"):  # shapes only
                training.initial.check(
                    cast("Any", training.task(stage.files(run_dir))).build_model()
                )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except BdbQuit:  # the user ended the debugger
            raise KeyboardInterrupt from None
        except Exception as error:  # its data are on other machines, say
            why = without_credentials(brief(message_of(error)))
            log.warning("%s: %s: init_from is checked when it starts: %s", where, stage.key, why)
