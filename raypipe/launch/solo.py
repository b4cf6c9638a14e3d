"""Worker of a training that needs only one, without the processes that Ray Train adds to a group.

A group of Ray Train is at least five processes: a controller, the worker, and actors that start,
synchronize and watch it. On two cores they take about 15 s to start; a single worker takes 4 s.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.errors import UnitError
from raypipe.launch import fault_environment
from raypipe.launch.admission import Admission
from raypipe.launch.failures import worker_failure
from raypipe.launch.job_mailbox import JobMailbox, Progress
from raypipe.launch.worker import compute_with, logged
from raypipe.training.ending import Ending
from raypipe.training.job import TrainingJob

_POLL_S = 0.5
_START_S = 600.0
_END_S = 20.0


class SoloWorker:
    """One worker process on a node, which is its own job mailbox. It runs jobs in sequence."""

    def __init__(self, job: TrainingJob, node: str) -> None:
        self._shape = _shape(job)
        cpus, gpus = self._shape
        self.mailbox: Any = (
            ray.remote(_Trainer)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env=fault_environment() or None,
            )
            .remote()
        )

    def await_start(self, unit: str, admission: Admission) -> None:
        """Wait until the process runs.

        Raises:
            UnitError: others use the node's resources, which raypipe does not see.
            KeyboardInterrupt: the run is interrupted.

        """
        answer, deadline = self.mailbox.threads.remote(), time.monotonic() + _START_S
        while not ray.wait([answer], timeout=_POLL_S)[0]:
            admission.pause()
            if time.monotonic() > deadline:
                message = f"the worker did not start within {_START_S / 60:.0f} minutes"
                raise UnitError(unit, "timeout", message)

    def serves(self, job: TrainingJob) -> bool:
        """Whether the worker could run the job."""
        return job.settings.scaling.most_workers == 1 and self._shape == _shape(job)

    def lasts(self, job: TrainingJob) -> bool:
        """Whether the worker can run other jobs after this one, which ended well.

        On a GPU every job gets a new process, so that its peak memory is its own.
        """
        return not job.settings.scaling.gpus_per_worker and self.serves(job)

    def close(self) -> None:
        """End the process, even in the middle of a job."""
        ray.kill(self.mailbox)
        with suppress(ray.exceptions.RayError):  # raised when the process is gone
            ray.get(self.mailbox.threads.remote(), timeout=_END_S)


class _Trainer(JobMailbox):
    """Job mailbox that runs its jobs itself, in a second thread."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes = frozenset({ray.get_runtime_context().get_node_id()})
        self._ending = Ending()

    async def submit(self, name: str, job: bytes, threads: int) -> None:
        """Start a pickled job; the previous job must have ended."""
        await super().submit(name, job, threads)
        self._ending = Ending()
        arguments = job, self._ending, asyncio.get_running_loop()
        threading.Thread(target=self._run, args=arguments, name="train", daemon=True).start()

    async def drain(self, seconds: float, threads: int, end: bool) -> Progress:
        """Return the progress since the last request; see the mailbox's."""
        self._ending.wanted = end
        self._ending_s = self._ending.seconds
        return await super().drain(seconds, threads, end)

    def _run(self, pickled: bytes, ending: Ending, loop: asyncio.AbstractEventLoop) -> None:
        from raypipe.training.loop import train

        def report(row: dict[str, Any] | str) -> None:
            compute_with(asyncio.run_coroutine_threadsafe(self.post(row), loop).result())

        unit = ""
        try:
            job: TrainingJob = cloudpickle.loads(pickled)
            unit = job.trial_id
            compute_with(self._threads)
            with logged(job, rank=0):
                outcome = train(job, job.lone_worker(), report, ending)
        except (Exception, SystemExit) as error:
            failure = worker_failure(unit, error)
            asyncio.run_coroutine_threadsafe(self.settle(failure), loop).result()
        else:
            asyncio.run_coroutine_threadsafe(self.finish(outcome), loop).result()


def _shape(job: TrainingJob) -> tuple[float, float]:
    scaling = job.settings.scaling
    return scaling.reserved_cpus, scaling.gpus_per_worker or 0.0
