"""Worker group of Ray Train that runs one training job after the other."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.placement_group import get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import UnitError
from raypipe.launch import fault_environment
from raypipe.launch.capacity import living_nodes
from raypipe.launch.failures import group_failure, worker_failure
from raypipe.launch.job_mailbox import Relay, Told
from raypipe.redaction import LogFormatter
from raypipe.training.job import Report, TrainingJob, Worker
from raypipe.training.loop import train

_POLL_S = 0.5
_START_ATTEMPTS = 60
_GROW_S = 30.0
_END_S = 20.0
_NEEDLESS = ("PlacementGroupCleanerCallback", "DatasetsCallback")


class WorkerGroup:
    """Workers on the nodes, and the process group between them.

    Ray Train makes both; an elastic group it makes anew, each job from its newest checkpoint, when
    there is room for more workers. Checkpoints, retries and metrics are our own: its state lags,
    and a report costs it a health-check interval. The workers take their jobs from ``relay``, an
    actor that any process may hand one to, see ``follow``.
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
        # beside the driver, where no lost node and no hungry neighbour takes it along for good
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.relay: Any = (
            ray.remote(Relay)
            .options(num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_task_retries=-1)
            .remote()
        )
        self._shape = _shape(job)
        self._run, self._name = job.run_dir, f"group-{secrets.token_hex(4)}"
        attempt: dict[str, Any] = {  # Ray's own state, which nothing of ours depends on
            "name": self._name,
            "storage_path": self._state,
            "storage_filesystem": None if job.run_dir.is_local else job.run_dir.fs,
            "worker_runtime_env": fault_environment() or None,
        }
        failures: dict[str, Any] = {"max_failures": 0, "controller_failure_limit": _START_ATTEMPTS}
        if "max_preemption_failures" in signature(FailureConfig).parameters:  # newer than Ray 2.55
            failures["max_preemption_failures"] = 0
        trainer = _Trainer(
            cast("Callable[[dict[Any, Any]], None]", _worker),
            train_loop_config={"relay": self.relay},
            scaling_config=ScalingConfig(
                use_gpu=gpus > 0,
                resources_per_worker={"CPU": scaling.cpus_per_worker, "GPU": gpus},
                **elastic,
            ),
            # NCCL refuses workers that share a GPU
            torch_config=TorchConfig(backend="nccl" if gpus >= 1 else "gloo"),
            run_config=RunConfig(failure_config=FailureConfig(**failures), **attempt),
        )
        self._over = threading.Event()
        self._nodes = set(living_nodes())
        threading.Thread(target=self._settle, args=(trainer,), name="fit", daemon=True).start()

    def serves(self, job: TrainingJob) -> bool:
        """Whether it could run the job, too."""
        return not self._over.is_set() and self._shape == _shape(job)

    def close(self) -> None:
        """End the workers, also those in the middle of a job."""
        group = ray.get(self.relay.close.remote())
        if group is not None and not self._over.is_set():
            remove_placement_group(group)
        # Ray Train, which sees its workers gone, is to put its own things away
        self._over.wait(_END_S)
        ray.kill(self.relay)
        self._run.delete(self._state)

    @property
    def _state(self) -> str:
        return self._run.path(f".ray-{self._name}")

    def _settle(self, trainer: TorchTrainer) -> None:
        """Run the group. Not in the main thread, where Ray Train would keep Ctrl-C's handler."""
        failure = UnitError(self._name, "error", "the worker group has ended")
        try:
            trainer.fit()
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
            failure = group_failure(self._name, error, self._nodes)
        except BaseException as error:  # whoever follows a job is to hear of it
            failure = UnitError(self._name, "error", f"{type(error).__name__}: {error}")
        self._over.set()
        self.relay.settle.remote(failure)


class _Trainer(TorchTrainer):
    """Without two actors of Ray's, for which there is no public switch.

    One ends the workers of a controller that died; they end without it. It asks whatever cluster
    it finds on the machine: beside one that has a dashboard it ends the workers of a group that
    is well. The other hands out Ray datasets, which nobody uses here. Each only takes time.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        return [each for each in callbacks if type(each).__name__ not in _NEEDLESS]


class Groups:
    """The worker groups of trials, each kept for the next one that it can serve.

    On a GPU each trial has a group of its own, so that its peak memory is its own.
    """

    def __init__(self) -> None:
        self._idle: list[WorkerGroup] = []

    def take(self, job: TrainingJob) -> WorkerGroup | None:
        """A group for a job; None for one that needs none. No idle one keeps its CPUs from it."""
        fit = [group for group in self._idle if group.serves(job)]
        others = [group for group in self._idle if group not in fit]
        self._idle = fit
        for group in others:
            group.close()
        if job.settings.scaling.most_workers == 1:
            return None
        return self._idle.pop() if self._idle else WorkerGroup(job)

    def give_back(self, group: WorkerGroup, job: TrainingJob) -> None:
        """The group of a job that came to its end."""
        if group.serves(job) and not job.settings.scaling.gpus_per_worker:
            self._idle.append(group)
        else:
            group.close()

    def close(self) -> None:
        """End those that are kept."""
        for group in self._idle:
            group.close()
        self._idle = []


def follow(
    relay: Any, job: TrainingJob, report: Report, pause: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Hand a job to a worker group, pass on what its workers tell, return what rank 0 returned.

    ``pause`` is called about twice a second and may raise what ends the waiting.

    Raises:
        UnitError: a worker failed or died, with the kind of failure.

    """
    name, pickled = _name(job), cloudpickle.dumps(job)
    ray.get(relay.submit.remote(name, pickled))
    while True:
        pause()
        told: Told = ray.get(relay.drain.remote(_POLL_S))
        if told.job != name:  # it was killed, for its memory, and started anew
            ray.get(relay.submit.remote(name, pickled))
        for each in told.rows:
            report(each)
        if told.outcome is not None:
            return told.outcome
        if (failure := told.failure) is not None:
            raise UnitError(job.trial_id, failure.kind, failure.message, failure.limit)


def _worker(config: dict[Any, Any]) -> None:
    """Run jobs in sequence in a worker; rank 0 reports."""
    relay = config["relay"]
    rank = ray.train.get_context().get_world_rank()
    ray.get(relay.join.remote(get_current_placement_group()))
    done: str | None = None
    while (pickled := ray.get(relay.next.remote(done))) is not None:
        job = cloudpickle.loads(pickled)
        _log_to_file(job, rank)
        outcome = _train(job, relay)
        if rank == 0:
            ray.get(relay.finish.remote(outcome))
        done = _name(job)


def _train(job: TrainingJob, relay: Any) -> dict[str, Any]:
    import torch
    from ray.train.torch import get_device

    posted: list[Any] = []

    def post(told: dict[str, Any] | str) -> None:
        ray.get(posted)  # one at a time: calls of an asynchronous actor may overtake each other
        posted[:] = [relay.post.remote(told)]

    context = ray.train.get_context()
    torch.set_num_threads(max(1, int(job.settings.scaling.cpus_per_worker)))
    worker = Worker(
        context.get_world_rank(),
        get_device(),
        context.get_world_size(),
        context.get_local_world_size(),
    )
    try:
        outcome = train(job, worker, post)
        ray.get(posted)
    except Exception as error:
        logging.getLogger(__name__).exception("%s failed", job.trial_id)
        raise worker_failure(job.trial_id, error) from error
    return outcome


def _name(job: TrainingJob) -> str:
    return f"{job.trial_id}-{job.attempt}"


def _shape(job: TrainingJob) -> tuple[Any, ...]:
    scaling = job.settings.scaling
    return scaling.workers, scaling.cpus_per_worker, scaling.gpus_per_worker


def _log_to_file(job: TrainingJob, rank: int) -> None:
    if job.run_dir.is_local:
        Path(job.run_dir.logs).mkdir(parents=True, exist_ok=True)
        name = f"{job.trial_id.replace('/', '-')}-{rank}.log"
        handler = logging.FileHandler(f"{job.run_dir.logs}/{name}")
        handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
