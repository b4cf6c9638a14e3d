"""Ray Train worker group that runs training jobs in sequence."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import ray
import ray.train
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.util.placement_group import get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import UnitError
from raypipe.launch import fault_environment
from raypipe.launch.capacity import living_nodes
from raypipe.launch.failures import CAUSES, group_failure, worker_failure
from raypipe.launch.job_mailbox import JobMailbox
from raypipe.launch.worker import compute_with, logged
from raypipe.training.ending import Ending
from raypipe.training.job import TrainingJob, Worker
from raypipe.training.oom import expandable_segments

# seconds of a request of the thread that waits for an early end
_WATCH_S = 2.0
# attempts to get the placement group of a worker group, and starts in which its workers may die
_START_ATTEMPTS, _FAILED_STARTS = 60, 2
_GROW_S = 30.0
_END_S = 20.0
_NEEDLESS = ("PlacementGroupCleanerCallback", "DatasetsCallback")


class WorkerGroup:
    """Workers on the nodes, and the process group between them.

    Ray Train makes both. It rebuilds an elastic group when there is room for more workers; each job
    then continues from its newest checkpoint. Checkpoints, retries and metrics are raypipe's own:
    Ray Train's state lags, and each report costs a health-check interval. The workers take jobs
    from ``mailbox``, an actor that any process may submit a job to; see ``follow``.
    """

    def __init__(self, job: TrainingJob) -> None:
        scaling = job.settings.scaling
        gpus = scaling.gpus_per_worker or 0.0
        elastic: dict[str, Any] = {"num_workers": scaling.most_workers}
        if scaling.fewest_workers < scaling.most_workers:
            elastic = {
                "num_workers": (scaling.fewest_workers, scaling.most_workers),
                "elastic_resize_monitor_interval_s": _GROW_S,
            }
        # on the driver's node, and restarted: it survives lost nodes and out-of-memory kills
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.mailbox: Any = (
            ray.remote(JobMailbox)
            .options(num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_task_retries=-1)
            .remote()
        )
        self._shape = _shape(job)
        self._run, self._name = job.run_dir, f"group-{secrets.token_hex(4)}"
        attempt: dict[str, Any] = {  # Ray's own state; raypipe does not read it
            "name": self._name,
            "storage_path": self._state,
            "storage_filesystem": None if job.run_dir.is_local else job.run_dir.fs,
            "worker_runtime_env": _environment(gpus) or None,
        }
        failures: dict[str, Any] = {"max_failures": 0, "controller_failure_limit": _START_ATTEMPTS}
        if "max_preemption_failures" in signature(FailureConfig).parameters:  # added after Ray 2.55
            failures["max_preemption_failures"] = 0
        trainer = _Trainer(
            cast("Callable[[dict[Any, Any]], None]", _worker),
            train_loop_config={"mailbox": self.mailbox},
            scaling_config=ScalingConfig(
                use_gpu=gpus > 0,
                resources_per_worker={"CPU": scaling.reserved_cpus, "GPU": gpus},
                **elastic,
            ),
            # NCCL rejects workers that share a GPU
            torch_config=TorchConfig(backend="nccl" if gpus >= 1 else "gloo"),
            run_config=RunConfig(failure_config=FailureConfig(**failures), **attempt),
        )
        self._over, self._is_closing = threading.Event(), False
        self._nodes = set(living_nodes())
        threading.Thread(target=self._settle, args=(trainer,), name="fit", daemon=True).start()

    def serves(self, job: TrainingJob) -> bool:
        """Whether the group could run the job."""
        return not self._over.is_set() and self._shape == _shape(job)

    def lasts(self, job: TrainingJob) -> bool:
        """Whether the group can run other jobs after this one, which ended well.

        On a GPU every job gets new processes, so that its peak memory is its own. An elastic group
        may have lost workers.
        """
        scaling = job.settings.scaling
        fixed = scaling.fewest_workers == scaling.most_workers
        return fixed and not scaling.gpus_per_worker and self.serves(job)

    def close(self) -> None:
        """End the workers, even in the middle of a job."""
        self._is_closing = True
        group = ray.get(self.mailbox.close.remote())
        if group is not None and not self._over.is_set():
            remove_placement_group(group)
        # give Ray Train time to clean up after its workers are gone
        self._over.wait(_END_S)
        ray.kill(self.mailbox)
        self._run.delete(self._state)

    @property
    def _state(self) -> str:
        return self._run.path(f".ray-{self._name}")

    def _settle(self, trainer: TorchTrainer) -> None:
        """Run the group; not in the main thread, where Ray Train would replace Ctrl-C's handler."""
        failure = UnitError(self._name, "error", "the worker group has ended")
        try:
            trainer.fit()
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
            if not self._is_closing:  # else workers died on purpose, and no caller waits
                failure = group_failure(self._name, error, self._nodes)
        except BaseException as error:  # the callers that follow a job must learn of it
            failure = UnitError(self._name, "error", f"{type(error).__name__}: {error}")
        self._over.set()
        self.mailbox.settle.remote(failure)


class _Patience(DefaultFailurePolicy):
    """Wait for room as long as Ray's policy does, but give up early on workers that do not start.

    Ray counts both against the same limit.
    """

    def __init__(self, failure_config: Any) -> None:
        super().__init__(failure_config)
        self._failed_starts = 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        """Return whether the controller starts the group again."""
        cause = getattr(training_failed_error, "controller_failure", None)
        self._failed_starts += isinstance(cause, WorkerGroupStartupFailedError)
        if self._failed_starts >= _FAILED_STARTS:
            return FailureDecision.RAISE
        return super().make_decision(training_failed_error)


class _Trainer(TorchTrainer):
    """Trainer with its own failure policy and without two of Ray's actors: no public switches.

    One of the actors ends the workers of a dead controller, which end anyway. It queries any
    cluster on the machine, and if another one has a dashboard, it ends the workers of a healthy
    group. The other distributes Ray datasets, which raypipe does not use. Both take time.
    """

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        arguments["failure_policy"] = _Patience(self.run_config.failure_config)
        return super()._initialize_and_run_controller(**arguments)  # type: ignore[misc]

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        return [each for each in callbacks if type(each).__name__ not in _NEEDLESS]


class Groups:
    """Worker groups of trials, kept for later trials that they can serve."""

    def __init__(self) -> None:
        self._idle: list[WorkerGroup] = []

    def take(self, job: TrainingJob) -> WorkerGroup | None:
        """Return a group for a job, None if it needs none; end idle groups that hold its CPUs."""
        fit = [group for group in self._idle if group.serves(job)]
        others = [group for group in self._idle if group not in fit]
        self._idle = fit
        for group in others:
            group.close()
        if job.settings.scaling.most_workers == 1:
            return None
        return self._idle.pop() if self._idle else WorkerGroup(job)

    def give_back(self, group: WorkerGroup, job: TrainingJob) -> None:
        """Keep the group of an ended job for reuse, or close it."""
        if group.lasts(job):
            self._idle.append(group)
        else:
            group.close()

    def close(self) -> None:
        """End the idle groups."""
        for group in self._idle:
            group.close()
        self._idle = []


def _worker(config: dict[Any, Any]) -> None:
    """Run jobs in sequence in a worker; rank 0 reports."""
    mailbox = config["mailbox"]
    rank = ray.train.get_context().get_world_rank()
    node = ray.get_runtime_context().get_node_id()
    ray.get(mailbox.join.remote(get_current_placement_group(), node))
    done: str | None = None
    while (submitted := ray.get(mailbox.next.remote(done))) is not None:
        done, pickled = submitted
        job = cloudpickle.loads(pickled)
        try:
            with logged(job, rank):
                outcome = _train(done, job, mailbox)
        except UnitError as failure:
            if failure.kind in CAUSES:  # Ray's report may take six seconds
                ray.get(mailbox.settle.remote(failure))
            raise
        if rank == 0:
            ray.get(mailbox.finish.remote(outcome))


def _train(name: str, job: TrainingJob, mailbox: Any) -> dict[str, Any]:
    from ray.train.torch import get_device

    from raypipe.training.loop import train

    posted: list[Any] = []

    def post(row: dict[str, Any] | str) -> None:
        # one at a time: calls to an asynchronous actor may overtake each other
        for threads in ray.get(posted):
            compute_with(threads)
        posted[:] = [mailbox.post.remote(row)]

    context = ray.train.get_context()
    compute_with(ray.get(mailbox.threads.remote()))
    worker = Worker(context.get_world_rank(), get_device(), context.get_world_size())
    over, ending = threading.Event(), Ending()
    if worker.rank == 0:
        watch = (name, mailbox, ending, over)
        threading.Thread(target=_watch, args=watch, name="ending", daemon=True).start()
    try:
        outcome = train(job, worker, post, ending)
        ray.get(posted)
    except Exception as error:
        if worker.rank:  # a consequence of another one's error, perhaps, which is recorded alone
            logging.getLogger(__name__).exception("%s failed", job.trial_id)
        raise worker_failure(job.trial_id, error) from error
    finally:
        over.set()
    return outcome


def _watch(name: str, mailbox: Any, ending: Ending, over: threading.Event) -> None:
    """Set whether the job should end early, until it is over."""
    while not over.is_set() and not ending.wanted:
        try:
            wanted = ray.get(mailbox.await_end.remote(name, ending.seconds, _WATCH_S))
        except ray.exceptions.RayError:  # the mailbox is gone, and soon this process
            over.wait(_WATCH_S)
        else:
            ending.wanted = wanted


def _environment(gpus: float) -> dict[str, Any]:
    """Return the runtime environment of workers; Ray Train starts CUDA before their function."""
    found = fault_environment()
    if gpus and (variables := expandable_segments()):
        return {"env_vars": {**found.get("env_vars", {}), **variables}}
    return found


def _shape(job: TrainingJob) -> tuple[Any, ...]:
    scaling = job.settings.scaling
    return scaling.workers, scaling.cpus_per_worker, scaling.gpus_per_worker
