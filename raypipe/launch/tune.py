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
from raypipe.launch.capacity import (
    WAIT_FOR_NODES_S,
    Shared,
    bundle,
    living_nodes,
    of_a_worker,
    requested,
    room,
)
from raypipe.launch.failures import group_failure
from raypipe.launch.group import Groups, WorkerGroup, follow
from raypipe.pipeline.launcher import Trials
from raypipe.storage.run_directory import RunDirectory
from raypipe.sweep.settings import SweepSettings
from raypipe.training.job import TrainingJob, Worker
from raypipe.training.loop import train
from raypipe.training.oom import unit_error

#: keys of a trial's reports to Tune: rows of the table ``steps``, and the outcome
_ROWS, _END = "rows", "end"
_ENDLESS = 10**9


def run_trials(trials: Trials, settings: SweepSettings, run: RunDirectory, shared: Shared) -> None:
    """Run trials until there are no more.

    ``trials`` decides, in this process, which trial comes next and records its outcome. A trial
    with one worker runs in Tune's actor. On a CPU that actor is reused; on a GPU each trial has a
    new process, so that its peak memory is its own. A trial with several workers trains in a Ray
    Train group; Tune's actor follows it and holds no CPU.

    Raises:
        KeyboardInterrupt: the run is interrupted.

    """
    state = run.path(".ray-tune")
    order = _Order(trials, settings.concurrent, shared)
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
            callbacks=[_Outcomes(trials, order, shared)],
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
        shared.release(order)
        run.delete(state)


class _Order(Searcher):
    """Searcher that gives Tune the next trial when there is room for it."""

    def __init__(self, trials: Trials, concurrent: int | None, shared: Shared) -> None:
        super().__init__()
        self._trials = trials
        self._concurrent = concurrent
        self._shared = shared
        self._cpus = 0.0
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
            return Searcher.FINISHED if self._trials.is_over else None
        if not (self._has_room(job) and self._may_start(job)):
            return None
        self._held, self.running[trial_id] = None, job
        group = self._groups.take(job)
        if group is not None:
            self._group_of[trial_id] = group
        mailbox = None if group is None else group.mailbox
        return {"job": job, "mailbox": mailbox, "faults": os.environ.get(VARIABLE, "")}

    def over(self, trial_id: str, *, ended: bool) -> TrainingJob:
        """Return the job of a trial that is over; free its group, or close it unless ``ended``."""
        job, group = self.running.pop(trial_id), self._group_of.pop(trial_id, None)
        if group is not None and ended:
            self._groups.give_back(group, job)
        elif group is not None:
            group.close()
        return job

    def _may_come(self, job: TrainingJob) -> bool:
        """Whether the trial fit on the initial nodes and lost ones may still return."""
        if _lacking_room(job, self._shared.nodes) is not None:
            return False
        if self._lacking_at is None:
            self._lacking_at = time.monotonic()
            workers = job.settings.scaling.fewest_workers
            self._request.enter_context(requested([bundle(*of_a_worker(job))] * workers))
        return time.monotonic() < self._lacking_at + WAIT_FOR_NODES_S

    def close(self) -> None:
        """End all worker groups and withdraw requests for nodes."""
        self._request.close()
        for group in self._group_of.values():
            group.close()
        self._groups.close()

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

    def _has_room(self, job: TrainingJob) -> bool:
        """Whether the nodes have room for this trial; if none is running, it may always start."""
        if not self.running:
            return True
        if self._concurrent is not None and len(self.running) >= self._concurrent:
            return False
        nodes = living_nodes().values()
        # on a CPU they would share caches and memory bandwidth: one per node
        if job.measured and not _needs(job)["GPU"] and len(self.running) >= len(nodes):
            return False
        for resource, mine in _needs(job).items():
            used = sum(_needs(other)[resource] for other in self.running.values())
            if used + mine > sum(node.get(resource, 0.0) for node in nodes) + 1e-9:
                return False
        return True

    def _may_start(self, job: TrainingJob) -> bool:
        """Whether concurrent stages leave enough CPUs.

        Until its end, the sweep holds the most CPUs that it ever needed: otherwise CPU tasks would
        take them between trials.
        """
        jobs = [*self.running.values(), job]
        self._cpus = max(self._cpus, sum(_needs(each)["CPU"] for each in jobs))
        return self._shared.hold(self, self._cpus)


class _Outcomes(Callback):
    """Callback that reports each trial's outcome to the sweep; Tune calls it in this process."""

    def __init__(self, trials: Trials, order: _Order, shared: Shared) -> None:
        self._trials, self._order, self._shared = trials, order, shared
        self._nodes = set(living_nodes())

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state, as ``_Order`` does."""
        return {}

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Check for an interrupt; Tune calls this about ten times per second."""
        del iteration, trials, info
        self._shared.pause()

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
        job = self._order.over(trial.trial_id, ended=ended)  # before its checkpoints are deleted
        if ended:
            self._trials.ended(job.trial_id, trial.last_result[_END][0])
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

    scaling = job.settings.scaling
    outcome: dict[str, Any] | UnitError
    try:
        last = job.steps
        if config["mailbox"] is not None:
            outcome = follow(config["mailbox"], job, report)
        else:
            torch.set_num_threads(max(1, int(scaling.cpus_per_worker)))
            device = torch.device("cuda", 0) if scaling.gpus_per_worker else torch.device("cpu")
            outcome = train(job, Worker(0, device), report)
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
    metric = {"loss_final": "loss"}.get(settings.metric_name, settings.metric_name)
    mode, grace = settings.direction, settings.grace_steps or 1
    scheduler: TrialScheduler
    if settings.scheduler == "asha":
        factor = settings.reduction_factor
        scheduler = AsyncHyperBandScheduler("step", metric, mode, _ENDLESS, grace, factor)
    elif settings.scheduler == "median":
        scheduler = MedianStoppingRule(
            "step",
            metric,
            mode,
            grace_period=grace,
            min_time_slice=cast("int", math.inf),  # it would pause trials to start others
        )
    else:
        return None
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
