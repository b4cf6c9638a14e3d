"""Trials of a sweep on Ray Tune."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import ray
from ray import cloudpickle, tune
from ray.tune import Callback, FailureConfig, PlacementGroupFactory, RunConfig, TuneConfig
from ray.tune.experiment import Trial
from ray.tune.schedulers import AsyncHyperBandScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher

from raypipe.errors import UnitError
from raypipe.faults import VARIABLE
from raypipe.launch.admission import Admission
from raypipe.launch.capacity import (
    WAIT_FOR_NODES_S,
    bundle,
    claim_of,
    living_nodes,
    of_a_worker,
    requested,
    room,
)
from raypipe.launch.failures import group_failure
from raypipe.launch.group import Groups, WorkerGroup
from raypipe.launch.train import follow
from raypipe.launch.worker import logged
from raypipe.pipeline.allocator import Lease
from raypipe.pipeline.launcher import Trials
from raypipe.storage.run_directory import RunDirectory
from raypipe.sweep.settings import SweepSettings
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.oom import unit_error

#: keys of a trial's reports to Tune: rows of the table ``steps``, and the outcome
_ROWS, _END = "rows", "end"
_ENDLESS = 10**9


def run_trials(
    trials: Trials,
    settings: SweepSettings,
    run: RunDirectory,
    admission: Admission,
    rank: float = 0.0,
) -> None:
    """Run trials until there are no more.

    ``trials`` decides, in this process, which trial comes next and records its outcome. A trial
    with one worker runs in Tune's actor. On a CPU that actor is reused; on a GPU each trial has a
    new process, so that its peak memory is its own. A trial with several workers trains in a Ray
    Train group; Tune's actor follows it and holds no CPU.

    Raises:
        KeyboardInterrupt: the run is interrupted.

    """
    state = run.path(".ray-tune")
    order = _Order(trials, settings.concurrent, admission, rank)
    nodes = living_nodes()
    on_gpu = any(node.get("GPU") for node in nodes.values())
    tuner = tune.Tuner(
        tune.with_resources(_train, _resources),
        tune_config=TuneConfig(
            search_alg=order,
            scheduler=scheduler_of(settings, trials),
            num_samples=-1,
            reuse_actors=not on_gpu,
            trial_dirname_creator=_name,
            trial_name_creator=_name,
        ),
        run_config=RunConfig(
            name="sweep",
            storage_path=state,
            storage_filesystem=None if run.is_local else run.fs,
            failure_config=FailureConfig(max_failures=0),
            callbacks=[_Outcomes(trials, order, admission)],
            verbose=0,
        ),
    )
    # a failed trial is a row in raypipe's tables
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    try:
        tuner.fit()
    except ray.exceptions.RayError as error:  # not a trial's error: Tune's own processes died
        raise group_failure("sweep", error, set(nodes)) from error
    finally:
        order.close()
        run.delete(state)


class _Order(Searcher):
    """Searcher that gives Tune the next trial when there is room for it."""

    def __init__(
        self, trials: Trials, concurrent: int | None, admission: Admission, rank: float = 0.0
    ) -> None:
        super().__init__()
        self._trials = trials
        self._concurrent = concurrent
        self._admission, self._rank = admission, rank
        # of the next trial; by trial; and those of ended trials, which the next one may take
        self._lease: Lease | None = None
        self._lease_of: dict[str, Lease] = {}
        self._idle: list[Lease] = []
        self._held: TrainingJob | None = None
        self._lacking_at: float | None = None
        self._request = ExitStack()
        self._groups = Groups()
        self._group_of: dict[str, WorkerGroup] = {}
        self.running: dict[str, TrainingJob] = {}

    def suggest(self, trial_id: str) -> Any:
        """Return the configuration of the next trial; None for later; FINISHED at the end."""
        job = self._held or self._trials.next()
        while job is not None and (lack := _lacking_room(job)) is not None:
            if self._may_come(job):
                self._held = job
                return None
            self._trials.ended(job.trial_id, UnitError(job.trial_id, "error", lack))
            job = self._trials.next()
        self._held, self._lacking_at = job, None
        self._request.close()
        if job is None:
            if not self._trials.is_over:
                return None
            self._release_idle()
            return Searcher.FINISHED
        if (lease := self._lease_for(job)) is None:
            return None
        self._held, self.running[trial_id], self._lease_of[trial_id] = None, job, lease
        group = self._groups.take(job)
        if group is not None:
            self._group_of[trial_id] = group
        return {
            "job": job,
            "mailbox": None if group is None else group.mailbox,
            "threads": job.settings.scaling.threads or self._admission.threads(lease),
            "faults": os.environ.get(VARIABLE, ""),
        }

    def over(self, trial_id: str, *, ended: bool) -> TrainingJob:
        """Return the job of a trial that is over; free its group, or close it unless ``ended``."""
        job, group = self.running.pop(trial_id), self._group_of.pop(trial_id, None)
        if group is not None and ended:
            self._groups.give_back(group, job)
        elif group is not None:
            group.close()
        self._idle.append(self._lease_of.pop(trial_id))
        return job

    def _may_come(self, job: TrainingJob) -> bool:
        """Whether the trial fit on the initial nodes and lost ones may still return."""
        if _lacking_room(job, self._admission.nodes) is not None:
            return False
        if self._lacking_at is None:
            self._lacking_at = time.monotonic()
            workers = job.settings.scaling.fewest_workers
            self._request.enter_context(requested([bundle(*of_a_worker(job))] * workers))
        return time.monotonic() < self._lacking_at + WAIT_FOR_NODES_S

    def close(self) -> None:
        """End all worker groups and leases, and withdraw requests for nodes."""
        self._request.close()
        for group in self._group_of.values():
            group.close()
        self._groups.close()
        self._withdraw()
        self._idle += self._lease_of.values()
        self._release_idle()

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Do nothing: see ``_Outcomes``."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: a run continues from the ledger."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: see ``save``."""

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state: Tune pickles a copy, but a sweep lives in this process."""
        return {}

    def _lease_for(self, job: TrainingJob) -> Lease | None:
        """Return the lease of the next trial, or None while it must wait.

        A trial takes over the lease of one that ended: otherwise CPU tasks would take its resources
        between trials. Trials whose speed is measured on CPUs get a node each; they would share
        caches and memory bandwidth.
        """
        if self._concurrent is not None and len(self.running) >= self._concurrent:
            return None
        claim = claim_of(job, alone=job.measured)
        while self._idle:
            lease = self._idle.pop()
            if lease.claim == claim and self._admission.fits(claim):
                self._withdraw()
                return lease
            self._admission.release(lease)
        if self._lease is None:
            self._lease = self._admission.request(claim, self._rank)
        if not self._admission.is_granted(self._lease):
            return None
        lease, self._lease = self._lease, None
        return lease

    def _withdraw(self) -> None:
        if self._lease is not None:
            self._admission.release(self._lease)
            self._lease = None

    def _release_idle(self) -> None:
        while self._idle:
            self._admission.release(self._idle.pop())


class _Outcomes(Callback):
    """Callback that reports each trial's outcome to the sweep; Tune calls it in this process."""

    def __init__(self, trials: Trials, order: _Order, admission: Admission) -> None:
        self._trials, self._order, self._admission = trials, order, admission
        self._nodes = set(living_nodes())

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state, as ``_Order`` does."""
        return {}

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Check for an interrupt; Tune calls this about ten times per second."""
        del iteration, trials, info
        self._admission.pause()

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Forward a trial's rows of the table ``steps``."""
        del iteration, trials, info
        job = self._order.running[trial.trial_id]
        for row in result.get(_ROWS, ()):
            self._trials.report(job.trial_id, row)

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Record that a trial finished, or that the scheduler stopped it."""
        del iteration, trials, info
        ended = _END in trial.last_result
        outcome = trial.last_result[_END][0] if ended else None
        # before its checkpoints are deleted; the workers of a failed trial are ending
        job = self._order.over(trial.trial_id, ended=isinstance(outcome, dict))
        if outcome is not None:
            self._trials.ended(job.trial_id, outcome)
        else:
            self._trials.stopped(job.trial_id)

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Record that a trial's process died; exceptions of a task are results, not errors."""
        del iteration, trials, info
        job = self._order.over(trial.trial_id, ended=False)
        # Tune's own getter reads a delayed copy
        path = trial.pickled_error_file
        error = cloudpickle.loads(Path(path).read_bytes()) if path else RuntimeError("unknown")
        self._trials.ended(job.trial_id, group_failure(job.trial_id, error, self._nodes))


def _train(config: dict[str, Any]) -> None:
    """Train one trial in Tune's actor; its outcome is the last report."""
    import torch

    os.environ[VARIABLE] = config["faults"]  # an existing cluster does not have them
    job: TrainingJob = config["job"]
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any] | str) -> None:
        if isinstance(row, str):
            return
        # reporting to Tune would count as measured time, and a trial that is at its end
        # must not be ended early
        if job.measured or row["step"] == last:
            rows.append(row)
        else:
            tune.report({**row, _ROWS: [row]})

    outcome: dict[str, Any] | UnitError
    try:
        last = job.steps
        if config["mailbox"] is not None:
            outcome = follow(config["mailbox"], job, report, lambda: config["threads"])
        else:
            torch.set_num_threads(config["threads"])
            with logged(job, rank=0):
                outcome = train(job, job.lone_worker(), report)
    except UnitError as error:
        outcome = error
    except Exception as error:  # any exception of a user's task is the trial's outcome
        outcome = unit_error(job.trial_id, error)
    tune.report({_ROWS: rows, _END: [outcome]})  # in a list: Tune flattens mappings


def _resources(config: dict[str, Any]) -> PlacementGroupFactory:
    """Return the resources of a trial's Tune actor; a worker group holds additional ones."""
    job: TrainingJob = config["job"]
    if job.settings.scaling.most_workers > 1:
        return PlacementGroupFactory([{"CPU": 0, "memory": 1}])
    return PlacementGroupFactory([_needs(job)])


def _needs(job: TrainingJob) -> dict[str, float]:
    """Return the CPUs and GPUs of all workers."""
    cpus, gpus = of_a_worker(job)
    workers = job.settings.scaling.most_workers
    return {"CPU": workers * cpus, "GPU": workers * gpus}


def _lacking_room(
    job: TrainingJob, nodes: Iterable[Mapping[str, float]] | None = None
) -> str | None:
    """Return why the trial does not fit on these nodes (default: living), or None if it fits."""
    cpus, gpus = of_a_worker(job)
    wanted, has = job.settings.scaling.fewest_workers, room(cpus, gpus, nodes=nodes)
    if has >= wanted:
        return None
    return (
        f"{wanted} worker(s) of {cpus:g} CPUs (with the loader's processes) and {gpus:g} GPUs "
        f"each were requested, but the cluster has room for {has}"
    )


def scheduler_of(settings: SweepSettings, trials: Trials) -> TrialScheduler | None:
    """Return the scheduler that stops bad trials, with earlier commands' results replayed."""
    if settings.scheduler not in ("asha", "median"):
        return None
    metric = {"loss_final": "loss"}.get(settings.metric_name, settings.metric_name)
    mode, grace = settings.direction, settings.grace_steps or 1
    scheduler: TrialScheduler
    if settings.scheduler == "asha":
        factor = settings.reduction_factor
        scheduler = AsyncHyperBandScheduler("step", metric, mode, _ENDLESS, grace, factor)
    else:
        scheduler = MedianStoppingRule(
            "step",
            metric,
            mode,
            grace_period=grace,
            min_time_slice=cast("int", math.inf),  # it would pause trials to start others
        )
    earlier: dict[str, Any] = {}
    for trial_id, row in trials.history():
        if trial_id not in earlier:
            earlier[trial_id] = _Earlier(trial_id)
            scheduler.on_trial_add(cast("Any", None), earlier[trial_id])
        scheduler.on_trial_result(cast("Any", None), earlier[trial_id], row)
    return scheduler


class _Earlier:
    """A trial of an earlier command, with the attributes that schedulers read."""

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


def _name(trial: Trial) -> str:
    """Return Tune's name for a trial and its folder."""
    return trial.trial_id
