"""A training job as a Ray Train worker group."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import FailureKind, UnitError
from raypipe.launch import fault_environment
from raypipe.training.job import Report, TrainingJob, Worker
from raypipe.training.loop import train
from raypipe.training.memory import failure_kind, unit_error

_POLL_S = 0.5
# how long a group may wait for its place before Ray counts the nodes anew
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")
_START_ATTEMPTS = 60
_GROW_S = 30.0
# Ray gives up a silent node after about this long
_NODE_VERDICT_S = 40.0
_PROBE_S = 5.0
# spot machines come back in minutes or not at all
_WAIT_FOR_NODES_S = 600.0

# what gloo and NCCL say on the workers that outlive another
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
)
# where Ray's exceptions keep their causes; its time limits have no public class
_CAUSES = ("health_check_failure", "controller_failure", "cause", "__cause__")
_TIMEOUTS = ("WorkerGroupStartupTimeoutError", "WorkerHealthCheckTimeoutError")
# the cause comes before its consequences on other ranks
_MOST_TELLING: tuple[FailureKind, ...] = (
    "out_of_memory",
    "host_out_of_memory",
    "invalid_value",
    "error",
    "timeout",
    "node_lost",
    "worker_died",
)


def fit(job: TrainingJob, report: Report) -> dict[str, Any]:
    """Run a training job once and return what rank 0 returned.

    Ray Train makes the worker group and its process group; an elastic one it starts anew, from
    the newest checkpoint, when there is room for more workers. Checkpoints, retries and
    metrics are our own: its state lags, and a report costs it a health-check interval.

    A later attempt than the first waits for nodes that were lost.

    Raises:
        UnitError: no room for the workers, or one failed or died, with the kind of failure.

    """
    scaling = job.settings.scaling
    gpus = scaling.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU", 0) >= scaling.fewest_workers else 0.0
    _await_room(job, scaling.cpus_per_worker, gpus, report)
    elastic: dict[str, Any] = {"num_workers": scaling.most_workers}
    if scaling.fewest_workers < scaling.most_workers:
        elastic = {
            "num_workers": (scaling.fewest_workers, scaling.most_workers),
            "elastic_resize_monitor_interval_s": _GROW_S,
        }
    state = job.run.path(".ray")
    nodes = _nodes()
    # beside the driver, where no lost node and no hungry neighbour takes it along for good
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    relay: Any = (
        ray.remote(_Relay)
        .options(num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_task_retries=-1)
        .remote()
    )
    attempt: dict[str, Any] = {  # Ray's own state, which nothing of ours depends on
        "name": f"{job.trial_id.replace('/', '-')}-{job.attempt}",
        "storage_path": state,
        "storage_filesystem": None if job.run.is_local else job.run.fs,
        "worker_runtime_env": fault_environment() or None,
    }
    failures: dict[str, Any] = {
        "max_failures": 0,
        "max_preemption_failures": 0,
        "controller_failure_limit": _START_ATTEMPTS,
    }
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
    threading.Thread(target=_settle, args=(running, trainer), name="fit", daemon=True).start()
    try:
        while not wait([running], timeout=_POLL_S).done:
            _pass_on(relay, report)
        result = running.result()
        _pass_on(relay, report)
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        raise _failure(job.trial_id, error, nodes) from error
    finally:
        ray.kill(relay)
        job.run.delete(state)
    outcome: dict[str, Any] = result.return_value
    return outcome


def _settle(running: Future[Any], trainer: TorchTrainer) -> None:
    """Run the group. Not in the main thread, where Ray Train would keep the handler of Ctrl-C."""
    try:
        running.set_result(trainer.fit())
    except BaseException as error:  # whatever it is, the main thread raises it
        running.set_exception(error)


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
        failure = unit_error(job.trial_id, error)
        if failure.kind == "error" and any(sign in str(error) for sign in _LOST_PEER):
            # Ray ends the group, and so this sleep, when it knows which worker died of what
            time.sleep(_NODE_VERDICT_S)
            failure = UnitError(job.trial_id, "worker_died", str(error))
        raise failure from error


def _failure(unit: str, error: Exception, nodes: set[str]) -> UnitError:
    """The most telling failure among the workers of a group that began on these nodes."""
    causes = list(getattr(error, "worker_failures", {}).values()) or [error]
    failures = [_classify(unit, cause) for cause in causes]
    worst = min(failures, key=lambda failure: _MOST_TELLING.index(failure.kind))
    if worst.kind == "worker_died" and _is_node_gone(nodes):
        return UnitError(unit, "node_lost", f"a node of the cluster is gone: {worst.message}")
    return worst


def _classify(unit: str, error: BaseException) -> UnitError:
    """What a worker's failure is: the first in the chain of its causes that Ray or we named."""
    seen: BaseException | None = error
    while seen is not None:
        kind: FailureKind | None = None
        if isinstance(seen, UnitError):
            return UnitError(unit, seen.kind, seen.message, seen.limit)
        if isinstance(seen, ray.exceptions.OutOfMemoryError):
            kind = "host_out_of_memory"
        elif isinstance(seen, (ray.exceptions.NodeDiedError, ray.train.PreemptionError)):
            kind = "node_lost"
        elif isinstance(seen, ray.exceptions.RayActorError):
            kind = "node_lost" if seen.preempted else "worker_died"
        elif type(seen).__name__ in _TIMEOUTS:
            kind = "timeout"
        if kind is not None:
            return UnitError(unit, kind, str(seen))
        causes = (getattr(seen, name, None) for name in _CAUSES)
        seen = next((cause for cause in causes if cause is not None), None)
    return UnitError(unit, failure_kind(error), str(error))


def _nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _is_node_gone(nodes: set[str]) -> bool:
    """Whether one of these nodes died; Ray tells it some time after the workers on it."""
    deadline = time.monotonic() + _NODE_VERDICT_S
    while nodes <= _nodes():
        if time.monotonic() > deadline or _answer(nodes):
            return False
        time.sleep(_POLL_S)
    return True


def _answer(nodes: set[str]) -> bool:
    """Whether each node still starts a task."""
    probe = ray.remote(num_cpus=0, max_retries=0)(_nothing)
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    tasks = [probe.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    _, silent = ray.wait(tasks, num_returns=len(tasks), timeout=_PROBE_S)
    if silent:
        return False
    try:
        ray.get(tasks)
    except ray.exceptions.RayError:
        return False
    return True


def _nothing() -> None:
    pass


def _await_room(job: TrainingJob, cpus: float, gpus: float, report: Report) -> None:
    """Raises UnitError where the workers have no room, for Ray would wait for ever.

    A later attempt than the first had room: it waits for the nodes to come back.
    """
    wanted = job.settings.scaling.fewest_workers
    deadline = time.monotonic() + (_WAIT_FOR_NODES_S if job.attempt > 1 else 0)
    told = False
    while (room := _room(cpus, gpus)) < wanted:
        lack = (
            f"scaling.workers: {wanted} worker(s) of {cpus:g} CPUs and {gpus:g} GPUs each are "
            f"asked for, and the cluster has room for {room}"
        )
        if time.monotonic() >= deadline:
            kind: FailureKind = "node_lost" if job.attempt > 1 else "error"
            raise UnitError(job.trial_id, kind, f"{lack}; lower one of the three or add nodes")
        if not told:
            report(f"{lack}; waiting up to {_WAIT_FOR_NODES_S / 60:.0f} minutes for nodes")
            told = True
        time.sleep(_POLL_S)


def _room(cpus: float, gpus: float) -> int:
    """How many workers the living nodes hold, were they free."""
    room = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            by_cpu = has.get("CPU", 0.0) / cpus
            room += int(min(by_cpu, has.get("GPU", 0.0) / gpus if gpus else by_cpu) + 1e-9)
    return room


class _Relay:
    """Holds what the workers tell until the driver takes it."""

    def __init__(self) -> None:
        self._told: list[dict[str, Any] | str] = []

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
