"""A training job as a Ray Train worker group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from inspect import signature
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.placement_group import get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import FailureKind, UnitError
from raypipe.launch import fault_environment
from raypipe.launch.capacity import Shared, living_nodes, room
from raypipe.launch.failures import group_failure, worker_failure
from raypipe.training.job import Report, TrainingJob, Worker
from raypipe.training.loop import train

_POLL_S = 0.5
_START_ATTEMPTS = 60
_GROW_S = 30.0
# spot machines come back in minutes or not at all
_WAIT_FOR_NODES_S = 600.0
_END_S = 20.0
_END_POLL_S = 0.05


def fit(job: TrainingJob, report: Report, shared: Shared) -> dict[str, Any]:
    """Run a training job once and return what rank 0 returned.

    Ray Train makes the worker group and its process group; an elastic one it starts anew, from
    the newest checkpoint, when there is room for more workers. Checkpoints, retries and
    metrics are our own: its state lags, and a report costs it a health-check interval.

    A later attempt than the first waits for nodes that were lost.

    Raises:
        UnitError: no room for the workers, or one failed or died, with the kind of failure.
        KeyboardInterrupt: the run is interrupted.

    """
    scaling = job.settings.scaling
    gpus = scaling.gpus_per_worker or 0.0
    _await_room(job, scaling.cpus_per_worker, gpus, report, shared)
    elastic: dict[str, Any] = {"num_workers": scaling.most_workers}
    if scaling.fewest_workers < scaling.most_workers:
        elastic = {
            "num_workers": (scaling.fewest_workers, scaling.most_workers),
            "elastic_resize_monitor_interval_s": _GROW_S,
        }
    name = f"{job.trial_id.replace('/', '-')}-{job.attempt}"
    state = job.run.path(f".ray-{name}")
    nodes = set(living_nodes())
    # beside the driver, where no lost node and no hungry neighbour takes it along for good
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    relay: Any = (
        ray.remote(_Relay)
        .options(
            name=_relay_name(job),
            num_cpus=0,
            scheduling_strategy=here,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote()
    )
    attempt: dict[str, Any] = {  # Ray's own state, which nothing of ours depends on
        "name": name,
        "storage_path": state,
        "storage_filesystem": None if job.run.is_local else job.run.fs,
        "worker_runtime_env": fault_environment() or None,
    }
    failures: dict[str, Any] = {"max_failures": 0, "controller_failure_limit": _START_ATTEMPTS}
    if "max_preemption_failures" in signature(FailureConfig).parameters:  # newer than Ray 2.55
        failures["max_preemption_failures"] = 0
    trainer = TorchTrainer(
        cast("Callable[[dict[Any, Any]], None]", _worker),
        train_loop_config={"job": job, "relay": relay},
        scaling_config=ScalingConfig(
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": scaling.cpus_per_worker, "GPU": gpus},
            **elastic,
        ),
        torch_config=TorchConfig(backend="nccl" if gpus > 0 else "gloo"),
        run_config=RunConfig(failure_config=FailureConfig(**failures), **attempt),
    )
    running: Future[Any] = Future()
    threading.Thread(
        target=_settle, args=(running, trainer, relay), name="fit", daemon=True
    ).start()
    try:
        while not wait([running], timeout=_POLL_S).done:
            _pass_on(relay, report)
            shared.pause(0)
        result = running.result()
        _pass_on(relay, report)
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        raise group_failure(job.trial_id, error, nodes) from error
    finally:
        if not running.done():
            end(job)
        ray.kill(relay)
        job.run.delete(state)
    outcome: dict[str, Any] = result.return_value
    return outcome


def end(job: TrainingJob) -> None:
    """End the worker group of a job that trains on though its ``fit`` is not waited for.

    Any process may call it: what Tune stops goes on in the trial's own process.
    """
    deadline = time.monotonic() + _END_S
    group: Any
    over: bool
    try:
        relay = ray.get_actor(_relay_name(job))
        group, over = ray.get(relay.group.remote())
        if group is not None and not over:
            remove_placement_group(group)
        # Ray Train, which sees its workers gone, is to put its own things away
        while group is not None and not over and time.monotonic() < deadline:
            time.sleep(_END_POLL_S)
            group, over = ray.get(relay.group.remote())
    except (ValueError, ray.exceptions.RayActorError):
        return  # there is no such actor: it ended by itself


def _relay_name(job: TrainingJob) -> str:
    return f"{job.run.location}/{job.trial_id}-{job.attempt}"


def _settle(running: Future[Any], trainer: TorchTrainer, relay: Any) -> None:
    """Run the group. Not in the main thread, where Ray Train would keep the handler of Ctrl-C."""
    try:
        running.set_result(trainer.fit())
    except BaseException as error:  # whatever it is, the main thread raises it
        running.set_exception(error)
    relay.settle.remote()


def _pass_on(relay: Any, report: Report) -> None:
    """Hand on what the workers told since the last time."""
    for told in ray.get(relay.drain.remote()):
        report(told)


def _worker(config: dict[Any, Any]) -> Any:
    """What each worker runs; only rank 0 reports and returns its outcome."""
    import torch
    from ray.train.torch import get_device

    job: TrainingJob = config["job"]
    context = ray.train.get_context()
    torch.set_num_threads(max(1, int(job.settings.scaling.cpus_per_worker)))
    rank = context.get_world_rank()
    _log_to_file(job, rank)
    ray.get(config["relay"].join.remote(get_current_placement_group()))  # or nobody waits for it

    def post(told: dict[str, Any] | str) -> None:
        config["relay"].post.remote(told)

    try:
        return train(
            job,
            Worker(rank, get_device(), context.get_world_size(), context.get_local_world_size()),
            post,
        )
    except Exception as error:
        logging.getLogger(__name__).exception("%s failed", job.trial_id)
        raise worker_failure(job.trial_id, error) from error


def _await_room(job: TrainingJob, cpus: float, gpus: float, report: Report, shared: Shared) -> None:
    """Raises UnitError where the workers have no room, for Ray would wait for ever.

    A later attempt than the first had room: it waits for the nodes to come back.
    """
    wanted = job.settings.scaling.fewest_workers
    deadline = time.monotonic() + (_WAIT_FOR_NODES_S if job.attempt > 1 else 0)
    told = False
    while (has := room(cpus, gpus)) < wanted:
        lack = (
            f"scaling.workers: {wanted} worker(s) of {cpus:g} CPUs and {gpus:g} GPUs each are "
            f"asked for, and the cluster has room for {has}"
        )
        if time.monotonic() >= deadline:
            kind: FailureKind = "node_lost" if job.attempt > 1 else "error"
            raise UnitError(job.trial_id, kind, f"{lack}; lower one of the three or add nodes")
        if not told:
            report(f"{lack}; waiting up to {_WAIT_FOR_NODES_S / 60:.0f} minutes for nodes")
            told = True
        shared.pause(_POLL_S)


class _Relay:
    """Holds what the workers tell until the driver takes it, and where they are."""

    def __init__(self) -> None:
        self._told: list[dict[str, Any] | str] = []
        self._group: Any = None
        self._over = False

    def join(self, group: Any) -> None:
        self._group = group

    def settle(self) -> None:
        self._over = True

    def group(self) -> tuple[Any, bool]:
        return self._group, self._over

    def post(self, told: dict[str, Any] | str) -> None:
        self._told.append(told)

    def drain(self) -> list[dict[str, Any] | str]:
        told, self._told = self._told, []
        return told


def _log_to_file(job: TrainingJob, rank: int) -> None:
    if job.run.is_local:
        Path(job.run.logs).mkdir(parents=True, exist_ok=True)
        name = f"{job.trial_id.replace('/', '-')}-{rank}.log"
        logging.basicConfig(
            filename=f"{job.run.logs}/{name}",
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            force=True,
        )
