"""A training job as a Ray Train worker group."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from raypipe.errors import FailureKind, UnitError
from raypipe.launch import fault_environment
from raypipe.training.loop import Report, TrainingJob, Worker, train
from raypipe.training.memory import failure_kind

_POLL_S = 0.5


def fit(job: TrainingJob, report: Report) -> dict[str, Any]:
    """Run a training job once and return what rank 0 returned.

    Ray Train makes the worker group and its process group. Checkpoints, retries and metrics
    are our own: its state lags, and a report costs it a health-check interval.

    Raises:
        UnitError: a worker failed or died, with the kind of failure.

    """
    scaling = job.settings.scaling
    gpus = scaling.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU", 0) >= scaling.workers else 0.0
    _check_fits(job, scaling.workers, scaling.cpus_per_worker, gpus)
    state = job.run.path(".ray")
    placement: dict[str, Any] = {  # its own state, which nothing of ours depends on
        "name": f"{job.trial_id.replace('/', '-')}-{job.attempt}",
        "storage_path": state,
        "storage_filesystem": None if job.run.is_local else job.run.fs,
        "failure_config": FailureConfig(max_failures=0),
        "worker_runtime_env": fault_environment() or None,
    }
    relay: Any = ray.remote(_Relay).options(num_cpus=0).remote()
    trainer = TorchTrainer(
        cast("Callable[[dict[Any, Any]], None]", _worker),
        train_loop_config={"job": job, "relay": relay},
        scaling_config=ScalingConfig(
            num_workers=scaling.workers,
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": scaling.cpus_per_worker, "GPU": gpus},
        ),
        torch_config=TorchConfig(backend="nccl" if gpus > 0 else "gloo"),
        run_config=RunConfig(**placement),
    )
    running: Future[Any] = Future()
    threading.Thread(target=_settle, args=(running, trainer), name="fit", daemon=True).start()
    try:
        while not wait([running], timeout=_POLL_S).done:
            _pass_on(relay, report)
        result = running.result()
        _pass_on(relay, report)
    except ray.train.TrainingFailedError as error:
        raise _failure(job.trial_id, error) from error
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
    """Hand on what the workers logged since the last time."""
    for row in ray.get(relay.drain.remote()):
        report(row)


def _worker(config: dict[Any, Any]) -> Any:
    """What each worker runs; only rank 0 reports and returns its outcome."""
    import torch
    from ray.train.torch import get_device

    job: TrainingJob = config["job"]
    context = ray.train.get_context()
    torch.set_num_threads(max(1, int(job.settings.scaling.cpus_per_worker)))
    rank = context.get_world_rank()
    _log_to_file(job, rank)

    def post(row: dict[str, Any]) -> None:
        config["relay"].post.remote(row)

    try:
        return train(job, Worker(rank, get_device()), post)
    except Exception as error:
        # the kind travels in the text: the exception's own type may not unpickle elsewhere
        logging.getLogger(__name__).exception("%s failed", job.trial_id)
        raise UnitError(job.trial_id, failure_kind(error), str(error)) from error


def _failure(unit: str, error: Exception) -> UnitError:
    """The most telling failure among the workers of a group."""
    failures = getattr(error, "worker_failures", {})
    kinds: list[tuple[FailureKind, str]] = []
    for cause in failures.values():
        kind, message = _classify(cause)
        kinds.append((kind, message))
    for wanted in (
        "out_of_memory",
        "host_out_of_memory",
        "invalid_value",
        "error",
        "node_lost",
        "worker_died",
    ):
        for kind, message in kinds:
            if kind == wanted:
                return UnitError(unit, kind, message)
    return UnitError(unit, "error", str(error))


def _classify(cause: BaseException) -> tuple[FailureKind, str]:
    seen: BaseException | None = cause
    while seen is not None:
        if isinstance(seen, UnitError):
            return seen.kind, seen.message
        if isinstance(seen, ray.exceptions.OutOfMemoryError):
            return "host_out_of_memory", str(seen)
        if isinstance(seen, ray.exceptions.NodeDiedError):
            return "node_lost", str(seen)
        if type(seen).__name__ == "WorkerHealthCheckFailedError" or isinstance(
            seen, ray.exceptions.RayActorError
        ):
            return "worker_died", str(seen)
        seen = getattr(seen, "cause", None) or seen.__cause__
    return failure_kind(cause), str(cause)


def _check_fits(job: TrainingJob, workers: int, cpus: float, gpus: float) -> None:
    """Ray waits for ever for what no node has; say so instead."""
    has = ray.cluster_resources()
    for name, wanted in (("CPU", workers * cpus), ("GPU", workers * gpus)):
        if wanted > has.get(name, 0.0):
            raise UnitError(
                job.trial_id,
                "error",
                f"{workers} worker(s) ask for {wanted:g} {name}s and the cluster has "
                f"{has.get(name, 0.0):g}; lower scaling.workers or "
                f"scaling.{name.lower()}s_per_worker",
            )


class _Relay:
    """Holds logged steps between the workers and the driver."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def post(self, row: dict[str, Any]) -> None:
        self._rows.append(row)

    def drain(self) -> list[dict[str, Any]]:
        rows, self._rows = self._rows, []
        return rows


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
