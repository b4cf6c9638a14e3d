"""Training job on Ray: a task in which Ray Train runs the training function.

With one worker, the task is the worker: Ray Train calls the function in its process. With several,
the task only starts a worker group and waits for it; Ray places the group as a whole.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe import redaction
from raypipe.errors import UnitError
from raypipe.graph.launcher import Control
from raypipe.launch import leave_out_imports, runtime_environment
from raypipe.launch.failures import group_failure, worker_failure
from raypipe.launch.mailbox import Mailbox
from raypipe.launch.nodes import Wait, bundle, living_nodes
from raypipe.launch.task import redirected
from raypipe.training.ending import Ending
from raypipe.training.failure_kinds import expandable_segments
from raypipe.training.job import Report, TrainingJob
from raypipe.training.parallel import Worker
from raypipe.training.settings import cpus_of_a_worker

#: seconds to wait until the output of a job is copied, and for the end of the copying process
_COPY_S, _COPY_END_S = 10.0, 0.1
_POLL_S = 0.5
#: seconds for the end of a task that was canceled
_END_S = 20.0
#: seconds that each start of a worker group waits for its resources, and the number of starts
_WAIT_S, _STARTS = 10**9, 2
#: key of the first row of every attempt of ``fit``, once its resources are there: the placement
#: group of the workers, None for a worker without one
STARTED = "started"


def start_mailbox() -> Any:
    """Return a mailbox on this node, which survives lost nodes and out-of-memory kills."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    kept = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    return ray.remote(Mailbox).options(num_cpus=0, **kept).remote()


def fit(
    job: TrainingJob,
    report: Report,
    started: Callable[[Any], None],
    mailbox: Any,
    control: Control,
    state: str = ".ray-train",
) -> dict[str, Any]:
    """Run a training job once in a task and return rank 0's result.

    Args:
        job: the job.
        report: receives its progress.
        started: called when it has its resources, with the placement group of a worker group.
        mailbox: the command's.
        control: the command's.
        state: beginning of the name of a folder in the run directory, for what Ray Train writes.

    Raises:
        UnitError: a worker failed or died, or there is no room for the workers.
        KeyboardInterrupt: the run is interrupted, or has come to its end with a checkpoint.

    """
    nodes = set(living_nodes())
    asked, scaling = of_a_worker(job), job.settings.scaling
    wait = Wait(asked, scaling.worker_count, control.nodes, report)
    refuse_vain(job, wait)
    key = secrets.token_hex(4)
    name, folder = f"{job.trial_id}-{key}", job.run_dir.path(f"{state}-{key}")
    own = asked if scaling.worker_count == 1 else {}  # a group holds its own
    task = _TASK.options(
        num_cpus=own.get("CPU", 0),
        num_gpus=own.get("GPU", 0),
        max_retries=0,
        runtime_env=_environment(job),
    )

    def post(row: dict[str, Any] | str) -> None:
        ray.get(mailbox.post.remote(name, row))

    def must_end() -> bool:
        return bool(ray.get(mailbox.must_end.remote(name)))

    with control.working() as work:
        control.place(name, scaling.worker_count)
        reference = task.remote(job, post, must_end, folder)
        group, is_placed, start = None, False, time.monotonic()
        try:
            while True:
                ready, _ = ray.wait([reference], timeout=_POLL_S)
                ends = control.is_winding_down
                for row in ray.get(mailbox.collect.remote(name, ends)):
                    if isinstance(row, str) or STARTED not in row:
                        report(row)
                        continue
                    group, is_placed, start = row[STARTED], True, time.monotonic()
                    control.placed(name)
                    started(group)
                if ready:
                    outcome: dict[str, Any] = ray.get(reference)
                    break
                control.pause()
                if not is_placed:
                    if control.is_winding_down:
                        control.await_end(work)
                    refuse_vain(job, wait)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise group_failure(job.trial_id, cause, nodes) from error
        finally:
            _end(reference, group)
            control.ended(name)
            if not own:
                job.run_dir.delete(folder)
        if "ended_at" in outcome:
            control.await_end(work)
        seconds = time.monotonic() - start
        used = {n: seconds * scaling.worker_count * asked.get(n, 0.0) for n in ("CPU", "GPU")}
        return {**outcome, "leased": (seconds, used["CPU"], used["GPU"])}


def of_a_worker(job: TrainingJob) -> dict[str, float]:
    """Return the resources of a worker, with the CPUs of its loader's processes.

    A measured trial has its GPUs to itself.
    """
    cpus, gpus = cpus_of_a_worker(job.settings), job.settings.scaling.gpus_per_worker or 0.0
    return bundle(cpus, max(1.0, gpus) if gpus and job.measured else gpus)


def refuse_vain(job: TrainingJob, wait: Wait) -> None:
    """Raise UnitError if the workers have no room on the nodes, and waiting is vain."""
    if wait.is_vain(job.trial_id):
        raise UnitError(
            job.trial_id,
            "node_lost" if wait.fitted or job.attempt > 1 else "error",
            f"scaling.workers: {job.settings.scaling.worker_count} worker(s) of {wait.size} each "
            "(with the loader's processes) were requested, and the cluster has no room for them; "
            "lower one of the three or add nodes",
        )


def _end(task: Any, group: Any) -> None:
    """End a task unless it has ended, and the worker group that it started, if any.

    Ray would keep the resources of a group whose starter was killed until the command ends.
    """
    if not ray.wait([task], timeout=0)[0]:
        ray.cancel(task, force=True)
        ray.wait([task], timeout=_END_S)
    if group is not None:
        remove_placement_group(group)


def train_with_ray(
    job: TrainingJob,
    report: Report,
    must_end: Callable[[], bool] | None = None,
    folder: str = "",
) -> dict[str, Any]:
    """Train under Ray Train: in this process, which is the worker, or in a worker group.

    Args:
        job: the job.
        report: called by rank 0 with its progress; picklable where there is a group.
        must_end: called by rank 0; whether the training should save a checkpoint and end.
        folder: of what Ray Train writes about a group, which nobody reads.

    Returns:
        Rank 0's result.

    Raises:
        UnitError: this worker failed.
        ray.train.TrainingFailedError: a worker of the group failed or died.

    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    scaling, asked = job.settings.scaling, of_a_worker(job)
    group: dict[str, Any] = {"scaling_config": ScalingConfig(num_workers=0)}
    if scaling.worker_count > 1:
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(_WAIT_S)
        # Ray's own types lack some of them; the group fails as soon as one of its workers does
        failures: dict[str, Any] = {"max_failures": 0, "controller_failure_limit": _STARTS}
        options: dict[str, Any] = {"worker_runtime_env": _environment(job)}
        group["run_config"] = RunConfig(
            name="group",
            storage_path=folder,
            storage_filesystem=None if job.run_dir.is_local else job.run_dir.fs,
            failure_config=FailureConfig(**failures),
            **options,
        )
        group["scaling_config"] = ScalingConfig(
            num_workers=scaling.worker_count,
            use_gpu="GPU" in asked,
            resources_per_worker={name: asked.get(name, 0.0) for name in ("CPU", "GPU")},
        )
        # NCCL rejects workers that share a GPU
        backend = "nccl" if (scaling.gpus_per_worker or 0.0) >= 1 else "gloo"
        group["torch_config"] = TorchConfig(backend=backend)
    trainer = TorchTrainer(
        cast("Callable[[dict[Any, Any]], None]", _work),
        train_loop_config={"job": job, "report": report, "must_end": must_end},
        **group,
    )
    return cast("dict[str, Any]", cast("Any", trainer.fit()).return_value)


#: for a worker, which runs many trainings
_leave_out_imports_once = cache(leave_out_imports)
#: one remote function for all trainings: Ray would start another worker for each further one
_TASK = ray.remote(train_with_ray)


def _environment(job: TrainingJob) -> dict[str, Any] | None:
    """Return the runtime environment of workers; Ray Train starts CUDA before their function."""
    has_gpus = job.settings.scaling.gpus_per_worker
    return runtime_environment(expandable_segments() if has_gpus else {})


def _work(config: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker; rank 0 reports."""
    import ray.train
    from ray.train.torch import get_device

    from raypipe.training.loop import lone_worker, train

    job, report, must_end = config["job"], config["report"], config["must_end"]
    if job.settings.scaling.worker_count == 1:
        worker = lone_worker(job)
    else:
        context = ray.train.get_context()
        worker = Worker(context.get_world_rank(), get_device(), context.get_world_size())
    if torch.get_num_threads() != job.settings.scaling.threads:
        torch.set_num_threads(job.settings.scaling.threads)
    _leave_out_imports_once()
    over, ending = threading.Event(), Ending()
    if worker.rank == 0 and must_end is not None:
        report({STARTED: get_current_placement_group()})
        watch = partial(_watch, must_end, ending, over)
        threading.Thread(target=watch, name="ending", daemon=True).start()
    # Tune ends a trial by a SystemExit in `report`
    caught = Exception if must_end is None else (Exception, SystemExit)
    with logged(job, worker.rank):
        try:
            return train(job, worker, report, ending)
        except caught as error:
            if worker.rank:  # perhaps a consequence of another one's error, which alone is recorded
                logging.getLogger(__name__).exception("%s failed", job.trial_id)
            raise worker_failure(job.trial_id, error) from error
        finally:
            over.set()


def _watch(must_end: Callable[[], bool], ending: Ending, over: threading.Event) -> None:
    """Set whether the training should end early, until it is over."""
    while not ending.wanted and not over.wait(_POLL_S):
        try:
            ending.wanted = must_end()
        except RayError:  # the command is gone, and soon this process
            return


@contextmanager
def logged(job: TrainingJob, rank: int) -> Iterator[None]:
    """Write what this process prints and logs to the log of a training, which only then exists.

    Credentials are redacted before anything is written. On an object store the log is written at
    the end of the job.
    """
    path = job.run_dir.log(job.trial_id if rank == 0 else f"{job.trial_id}-{rank}")
    local = job.run_dir.is_local
    if local:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("ab") if local else tempfile.TemporaryFile() as log:
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(format=form, level=logging.INFO, force=True)
        try:
            with _redacted(log.fileno()) as file, redirected(file):
                yield
        finally:
            size = os.fstat(log.fileno()).st_size
            if local and not size:
                Path(path).unlink(missing_ok=True)
            elif size and not local:
                earlier = job.run_dir.read(path) if job.run_dir.exists(path) else b""
                job.run_dir.write(path, earlier + os.pread(log.fileno(), size, 0))


@contextmanager
def _redacted(file: int) -> Iterator[int]:
    """Yield a descriptor; what is written to it arrives in the file without credentials.

    Another process copies it, so that the last words of a dying process arrive, too.
    """
    own, control = socket.socketpair()
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", redaction.__file__, str(control.fileno())]
    process = subprocess.Popen(
        command, stdin=reading, stdout=file, pass_fds=[control.fileno()], start_new_session=True
    )
    os.close(reading)
    control.close()
    try:
        yield writing
    finally:
        os.close(writing)
        own.settimeout(_COPY_S)
        with own, suppress(OSError):
            own.shutdown(socket.SHUT_WR)
            own.recv(1)  # returns when everything is copied
        with suppress(subprocess.TimeoutExpired):  # else a process that the job started goes on
            process.wait(_COPY_END_S)
