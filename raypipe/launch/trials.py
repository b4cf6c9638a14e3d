"""Trials of a sweep on Ray Tune."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote, unquote

import numpy as np
import ray
from ray import cloudpickle, tune
from ray.tune import (
    Callback,
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    PlacementGroupFactory,
    RunConfig,
    TuneConfig,
)
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher, create_searcher
from ray.util.placement_group import remove_placement_group

from raypipe.config.axes import AxisSettings
from raypipe.config.matrix import Point
from raypipe.errors import UnitError
from raypipe.faults import VARIABLE
from raypipe.graph.launcher import Control
from raypipe.launch.failures import group_failure
from raypipe.launch.nodes import Wait, living_nodes, room
from raypipe.launch.training import (
    fit,
    of_a_worker,
    refuse_vain,
    start_mailbox,
    train_with_ray,
)
from raypipe.store.run_directory import RunDirectory
from raypipe.study.population import CHANGEABLE, Lineage, changeable, take_over, within
from raypipe.study.space import rounded
from raypipe.study.sweep import Sweep
from raypipe.study.sweep_settings import SweepSettings
from raypipe.training.checkpoint import CheckpointStore
from raypipe.training.failure_kinds import unit_error
from raypipe.training.job import TrainingJob

#: keys of a trial's reports to Tune: the placement group of its workers, rows of the table
#: ``steps``, and the outcome
_GROUP, _ROWS, _END = "group", "rows", "end"
#: folder of what Ray writes about a sweep and its worker groups, removed at its end
_STATE = ".ray-tune"
_ENDLESS = 10**9
#: variable of Ray Tune: the number of trials that wait for resources at most
_MOST_PENDING = "TUNE_MAX_PENDING_TRIALS_PG"


def run_trials(trials: Sweep, run: RunDirectory, control: Control) -> None:
    """Run trials until there are no more.

    ``trials`` decides, in this process, which trial comes next and records its outcome. A trial
    with one worker runs in Tune's actor. On a CPU that actor is reused; on a GPU each trial has a
    new process, so that its peak memory is its own. A trial with several workers trains in a worker
    group; Tune's actor only waits for it and holds no CPU.

    Raises:
        KeyboardInterrupt: the run is interrupted.

    """
    state = run.path(_STATE)
    order = _Order(trials, control)
    if trials.settings.pauses:  # all its trials are there from the start, and take turns
        os.environ[_MOST_PENDING] = str(_ENDLESS)
    nodes = living_nodes()
    on_gpu = any(node.get("GPU") for node in nodes.values())
    tuner = tune.Tuner(
        # Tune calls the function in this process
        tune.with_resources(_train, lambda config: PlacementGroupFactory([config["needs"]])),
        tune_config=TuneConfig(
            search_alg=order,
            scheduler=scheduler_of(trials),
            num_samples=-1,
            reuse_actors=not on_gpu,
            trial_dirname_creator=lambda trial: trial.trial_id,
            # a name stays what it is when its trial takes over another one
            trial_name_creator=lambda trial: quote(trial.config["job"].trial_id, safe=""),
        ),
        run_config=RunConfig(
            name="sweep",
            storage_path=state,
            storage_filesystem=None if run.is_local else run.fs,
            failure_config=FailureConfig(max_failures=0),
            # of a trial's newest states, from which others may go on
            checkpoint_config=CheckpointConfig(num_to_keep=4),
            callbacks=[_OutcomeCallback(trials, order, control)],
            verbose=0,
        ),
    )
    # a failed trial is a row in raypipe's tables
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    try:
        with control.working():
            tuner.fit()
    except ray.exceptions.RayError as error:  # not a trial's error: Tune's own processes died
        raise group_failure("sweep", error, set(nodes)) from error
    finally:
        os.environ.pop(_MOST_PENDING, None)
        run.delete(state)


def _no_state(_: object) -> dict[str, Any]:
    """Return an empty state: Tune pickles a copy, but a sweep lives in this process."""
    return {}


class _Order(Searcher):
    """Searcher that gives Tune the next trial when there is room for it."""

    def __init__(self, trials: Sweep, control: Control) -> None:
        super().__init__()
        self._trials, self._settings = trials, trials.settings
        self._control = control
        #: the next trial, and the wait for its room
        self._held: tuple[TrainingJob, Wait] | None = None
        self.running: dict[str, TrainingJob] = {}
        #: the placement groups of running trials with several workers
        self.groups: dict[str, Any] = {}

    def suggest(self, trial_id: str) -> Any:
        """Return the configuration of the next trial; None for later; FINISHED at the end."""
        most = self._settings.concurrent
        if most is not None and len(self.running) >= most:
            return None
        job = self._next()
        if job is None:
            return Searcher.FINISHED if self._held is None and self._trials.is_over else None
        # Tune would take more trials than there is room for, before their choice is due
        slots = (1 / _slots(each) for each in (job, *self.running.values()))
        if not self._settings.pauses and sum(slots) > 1 + 1e-9:
            return None
        self._held, self.running[trial_id] = None, job
        config = {"job": job, "needs": _needs(job), "faults": os.environ.get(VARIABLE, "")}
        if self._settings.pauses:
            return config | self._part_of_population(job)
        self._control.place(trial_id, 1)
        return config

    def _part_of_population(self, job: TrainingJob) -> dict[str, Any]:
        """Return what a trial that Tune pauses needs: when it reports what, and its settings.

        They are those that it has had in an earlier command, where it goes on.
        """
        settings, (every, metric) = self._settings, _decisions(self._trials)
        found: dict[str, Any] = {"every": every, "metric": metric}
        if settings.is_population:
            values = Lineage.of(job.run_dir, job.trial_id).values
            training = job.settings.training
            found |= {k: values.get(k, getattr(training, k)) for k in changeable(settings.axes)}
        return found

    def _next(self) -> TrainingJob | None:
        """Return the next trial; None while there is none, or the nodes have no room for it."""
        while True:
            if self._held is None:
                if (job := self._trials.next(propose)) is None:
                    return None
                workers = job.settings.scaling.worker_count
                wait = Wait(of_a_worker(job), workers, self._control.nodes, lambda _: None)
                self._held = job, wait
            job, wait = self._held
            try:
                refuse_vain(job, wait)
            except UnitError as error:
                self._trials.ended(job.trial_id, error)
                self._held = None
                continue
            return job if room(wait.asked) >= job.settings.scaling.worker_count else None

    def over(self, trial_id: str) -> TrainingJob:
        """Return the job of a trial that is over, whose workers end."""
        self._control.ended(trial_id)
        if (group := self.groups.pop(trial_id, None)) is not None:
            remove_placement_group(group)
        return self.running.pop(trial_id)

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """Do nothing: see ``_OutcomeCallback``."""

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a run continues from the ledger."""
        Path(checkpoint_path).touch()

    __getstate__ = _no_state


class _OutcomeCallback(Callback):
    """Callback that reports each trial's outcome to the sweep; Tune calls it in this process."""

    def __init__(self, trials: Sweep, order: _Order, control: Control) -> None:
        self._trials, self._order, self._control = trials, order, control
        self._nodes = set(living_nodes())

    __getstate__ = _no_state

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Check for an interrupt; Tune calls this about ten times per second."""
        self._control.pause()

    def on_trial_start(self, *_: Any, trial: Trial, **__: Any) -> None:  # type: ignore[override]
        """Record that a trial has its resources."""
        self._control.placed(trial.trial_id)

    def on_trial_result(self, *_: Any, trial: Trial, result: dict[str, Any], **__: Any) -> None:  # type: ignore[override]
        """Forward a trial's rows of the table ``steps``."""
        job = self._order.running[trial.trial_id]
        if (group := result.get(_GROUP)) is not None:
            self._order.groups[trial.trial_id] = group[0]
        for row in result.get(_ROWS, ()):
            self._trials.report(job.trial_id, row)

    def on_trial_complete(self, *_: Any, trial: Trial, **__: Any) -> None:  # type: ignore[override]
        """Record that a trial finished, or that the scheduler stopped it."""
        ended = _END in trial.last_result
        job = self._order.over(trial.trial_id)  # before its checkpoints are deleted
        if ended:
            self._trials.ended(job.trial_id, trial.last_result[_END][0])
        else:
            self._trials.stopped(job.trial_id)

    def on_trial_error(self, *_: Any, trial: Trial, **__: Any) -> None:  # type: ignore[override]
        """Record that a trial's process died; exceptions of a task are results, not errors."""
        job = self._order.over(trial.trial_id)
        # Tune's own getter reads a delayed copy
        path = trial.pickled_error_file
        error = cloudpickle.loads(Path(path).read_bytes()) if path else RuntimeError("unknown")
        self._trials.ended(job.trial_id, group_failure(job.trial_id, error, self._nodes))


def _train(config: dict[str, Any]) -> None:
    """Train one trial in Tune's actor; its outcome is the last report."""
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

    def started(group: Any) -> None:
        tune.report({_GROUP: [group]})  # this process may be killed before it ends the group

    outcome: dict[str, Any] | UnitError
    try:
        last = job.steps
        if "every" in config:
            outcome = _train_in_parts(config, rows)
        elif job.settings.scaling.worker_count == 1:
            outcome = train_with_ray(job, report)
        else:
            mailbox = start_mailbox()
            outcome = fit(job, report, started, mailbox, Control(), f"{_STATE}/group")
    except UnitError as error:
        outcome = error
    except Exception as error:  # any exception of a user's task is the trial's outcome
        outcome = unit_error(job.trial_id, error)
    # in a list: Tune flattens mappings; a trial that is done is not paused
    tune.report({_ROWS: rows, _END: [outcome], "done": True})


def _train_in_parts(config: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Train, and report with a checkpoint at regular steps, at which Tune may pause the trial.

    Or Tune continues it from another one's checkpoint, with its configuration and other settings.
    """
    values = {key: value for key, value in config.items() if key in CHANGEABLE}
    job: TrainingJob = config["job"]
    settings = job.settings.changed("training", **values)
    # the settings take the place of the identity, which is the same in the whole population
    own = unquote(str(tune.get_context().get_trial_name()))
    job = replace(job, trial_id=own, settings=settings, identity="")
    given = tune.get_checkpoint()
    lineage = take_over(job, values, given and (given.path, given.filesystem))

    def report(row: dict[str, Any] | str) -> None:
        if not isinstance(row, str):
            rows.append(row)

    begun = max(CheckpointStore(job.run_dir, own).steps, default=0)
    every, metric = config["every"], config["metric"]
    for step in range(begun - begun % every + every, job.whole, every):
        outcome = train_with_ray(replace(job, until=step), report)
        if outcome.get("stopped_early"):
            break
        lineage.steps += rows
        lineage.write(job.run_dir)
        if metric not in rows[-1]:
            raise UnitError(own, "error", f"sweep.metric = {metric}: no trial has it at a step")
        state = Checkpoint(job.run_dir.checkpoints(own), job.run_dir.fs)
        tune.report({**rows[-1], _ROWS: list(rows)}, checkpoint=state)
        rows.clear()
    return {**train_with_ray(job, report), "energy_j": None}  # known of the last part only


def _needs(job: TrainingJob) -> dict[str, float]:
    """Return what Tune's actor of a trial holds; a worker group holds additional resources.

    A trial whose speed is measured on CPUs holds all CPUs of a node, whatever it computes with.
    """
    if job.settings.scaling.worker_count > 1:
        return {"CPU": 0, "memory": 1}
    asked = {"CPU": 0.0, **of_a_worker(job)}
    if job.measured and "GPU" not in asked:
        cpus = [node.get("CPU", 1.0) for node in living_nodes().values()]
        asked["CPU"] = max([asked["CPU"], *cpus])
    return asked


def _slots(job: TrainingJob) -> int:
    """Return how many such trials run at the same time; measured ones on CPUs one per node."""
    scaling = job.settings.scaling
    if scaling.worker_count == 1:
        return max(1, room(_needs(job)))
    if job.measured and not scaling.gpus_per_worker:
        return 1
    return max(1, room(of_a_worker(job)) // scaling.worker_count)


def propose(
    settings: SweepSettings,
    axes: Mapping[str, AxisSettings],
    known: Sequence[tuple[Point, Sequence[float] | None]],
    number: int,
) -> Point:
    """Return the proposal of a searcher of Tune, which is made again from the stored trials.

    So it depends on these, its number and the seed, and not on the memory of a process.

    Args:
        settings: the section, with the name of the searcher and the seed.
        axes: the axes by full key.
        known: the points so far, each with its costs; None if it has failed or runs.
        number: the number of the proposal.

    Raises:
        UnitError: the searcher's package is not installed.

    """
    name = settings.search
    seed = int(np.random.SeedSequence([settings.seed, number]).generate_state(1)[0])
    costs = [f"cost_{place}" for place in range(1 + len(settings.further_metrics))]
    metric: Any = costs[0] if len(costs) == 1 else costs
    mode: Any = "min" if len(costs) == 1 else ["min"] * len(costs)
    points = [dict(point) for point, _ in known]
    given = {"points_to_evaluate": points, "seed": seed, "random_state_seed": seed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions to come, and of values that are lists
        try:
            searcher = create_searcher(name, metric=metric, mode=mode, **given)
        except (ImportError, AssertionError) as error:
            raise UnitError("sweep", "error", f"sweep.search = {name}: {error}") from error
        searcher.set_search_properties(metric, mode, {k: _domain(a) for k, a in axes.items()})
        for place, (_, values) in enumerate(known):
            searcher.suggest(str(place))
            result = None if values is None else dict(zip(costs, values, strict=True))
            searcher.on_trial_complete(str(place), result, error=result is None)
        found = searcher.suggest(str(len(known)))
    if not isinstance(found, Mapping):
        raise UnitError("sweep", "error", f"sweep.search = {name}: proposes nothing")
    return {key: rounded(axis, found[key]) for key, axis in axes.items()}


def _domain(axis: AxisSettings) -> Any:
    """Return an axis as a search space of Tune."""
    if axis.listed is not None:
        return tune.choice(list(axis.listed))
    low, high = axis.ends
    if axis.is_integer:
        draw: Any = tune.lograndint if axis.log else tune.randint
        return draw(int(low), int(high) + 1)
    return (tune.loguniform if axis.log else tune.uniform)(float(low), float(high))


def scheduler_of(trials: Sweep) -> TrialScheduler | None:
    """Return the scheduler of a sweep, if it has one."""
    settings = trials.settings
    if settings.scheduler is None:
        return None
    name, axes = settings.scheduler.name, changeable(settings.axes)
    every, metric = _decisions(trials)
    options: dict[str, Any] = {
        **{"time_attr": "step", "metric": metric, "mode": settings.mode},
        **settings.scheduler.options,
    }
    match name:
        case "asha":
            options |= {"grace_period": every, "max_t": _ENDLESS}
        case "median":  # it would pause trials to start others
            options |= {"grace_period": every, "min_time_slice": math.inf}
        case "hyperband":
            options |= {"max_t": trials.steps, "stop_last_trials": False}
        case "pbt":
            draws = {k: list(axis.listed or ()) or _domain(axis) for k, axis in axes.items()}
            options |= {
                "perturbation_interval": every,
                "hyperparam_mutations": draws,
                "custom_explore_fn": lambda config: config | within(axes, config),
                "require_attrs": False,
                "log_config": False,
            }
    full = {"asha": "async_hyperband", "median": "median_stopping_rule"}.get(name, name)
    scheduler = tune.create_scheduler(full, **options)
    if settings.is_population:
        # it rejects every searcher, as its trials have to be there from the start
        add, none = scheduler.on_trial_add, SimpleNamespace(search_alg=None)
        vars(scheduler)["on_trial_add"] = lambda _, trial: add(cast("Any", none), trial)
    return scheduler


def _decisions(trials: Sweep) -> tuple[int, str]:
    """Return the steps after which the scheduler decides, and the metric as a step has it."""
    scheduler, name = trials.settings.scheduler, trials.settings.metric_name
    options = {} if scheduler is None else scheduler.options
    given = options.get("grace_period") or options.get("perturbation_interval")
    return given or max(1, trials.steps // 10), "loss" if name == "loss_final" else name
