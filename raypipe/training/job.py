"""The job that a training worker receives and the progress it reports. Picklable.

Whoever describes a training imports this module; it works without torch, which takes seconds to
import. The task of a training with torch is in :mod:`raypipe.training.task`.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Table
from raypipe.training import schedule
from raypipe.training.batching import BatchPlan
from raypipe.training.schedule import Phase, steps
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from raypipe.training.tables import SETTINGS, STEPS
from raypipe.training.weights import InitialWeights

if TYPE_CHECKING:
    from raypipe.training.ending import Ending

#: receives logged steps (rows) and messages to the user (text) during the run; not called for
#: every step
Report = Callable[[dict[str, Any] | str], None]
#: returns the trace of a training after a number of steps; None beyond its end
ScheduleTrace = Callable[[int], str | None]


class JobTask:
    """Task of a training job, whatever program trains. Subclasses must be picklable."""

    #: unit of the work of a step, which is that of ``Loss.weight``
    counts: Literal["samples", "tokens"] = "samples"

    def phases(self, training: TrainingSettings, effective_batch: int) -> Sequence[Phase]:
        """Return the phases of the run: by default one, in epochs if the length is in epochs."""
        return [Phase("train", training.length, effective_batch, training.learning_rate)]

    def learning_rate(self, training: TrainingSettings, phase: Phase, step: int) -> float:
        """Return the learning rate of a phase's step, counted from 0; by default the settings'.

        A checkpoint is continued only by a training with the same rates up to it.
        """
        return schedule.learning_rate(training, phase, step)

    def shortened(self) -> tuple[JobTask, str] | None:
        """Return the task with shorter samples and a description; None if none is possible.

        Called for ``on_oom: [shorten]``.
        """
        return None

    def columns(self) -> Mapping[str, Any]:
        """Return values of columns of ``trials`` that differ from, or add to, the settings'."""
        return {}

    def placed(self, settings: TrainStageSettings) -> TrainStageSettings:
        """Return the settings with which the launcher runs the training."""
        return settings

    def done(self, row: Mapping[str, Any], training: TrainingSettings) -> int:
        """Return how much of the training a logged step has done, in the steps of its phases."""
        del training
        return int(row["step"])


@dataclass(frozen=True)
class TrainingJob:
    """Description of a training run for its workers.

    ``plan`` is for the largest number of workers; a smaller group uses more accumulation steps.
    ``eval_batch`` is the number of samples per worker per forward pass of an evaluation. A
    ``measured`` run is a benchmark: it does not evaluate and keeps no checkpoint or model.
    ``identity`` is the hash of everything that decides the result except for the length and the
    schedule: only checkpoints with the same one are continued. A job that ``continues`` a finished
    training needs a checkpoint of it. ``initial`` are the weights to start from, if they are
    another run's.
    """

    trial_id: str
    run_id: str
    task: JobTask
    settings: TrainStageSettings
    plan: BatchPlan
    run_dir: RunDirectory
    steps_table: Table = STEPS
    attempt: int = 1
    eval_batch: int | None = None
    measured: bool = False
    until: int | None = None
    identity: str = ""
    continues: bool = False
    initial: InitialWeights | None = None

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of the whole training, which may read the data."""
        return self.task.phases(self.settings.training, self.plan.effective_batch)

    @property
    def whole(self) -> int:
        """Number of optimizer steps of the whole training."""
        return sum(phase.steps for phase in self.phases)

    @property
    def steps(self) -> int:
        """Step after which this run ends."""
        return self.whole if self.until is None else min(self.until, self.whole)

    def row(
        self, stage: str, status: str, device: str, outcome: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the row of the trial: its settings, then what the run and the sweep report.

        Args:
            stage: the stage that ran it.
            status: its status.
            device: the device that it was meant for; the outcome knows the real one.
            outcome: measured columns, metrics of the last evaluation, columns of a sweep.

        """
        row: dict[str, Any] = {
            "trial_id": self.trial_id,
            "stage": stage,
            "status": status,
            "device": device,
            "attempts": self.attempt,
            "strategy": self.settings.scaling.strategy,
        }
        for column in SETTINGS:
            owner = self.plan if hasattr(self.plan, column.name) else self.settings.training
            row.setdefault(column.name, getattr(owner, column.name, None))
        if self.initial is not None:
            row |= {"init_from": self.initial.shown, "init_sha256": self.initial.sha256}
        return {**row, **self.task.columns(), **outcome}


class ExternalTask(JobTask, ABC):
    """Training by another program, which a single worker runs on the resources of all workers.

    It has no model, dataset or loss: ``run`` takes the place of the training loop.
    """

    @abstractmethod
    def run(self, job: TrainingJob, report: Report, ending: Ending) -> dict[str, Any]:
        """Train to completion; parameters, result and errors are those of ``loop.train``."""

    def placed(self, settings: TrainStageSettings) -> TrainStageSettings:
        """Return the settings for one worker that reserves the resources of all, on one node."""
        scaling = settings.scaling
        if (workers := scaling.worker_count) == 1:
            return settings
        gpus = workers * (scaling.gpus_per_worker or 0)
        cpus = workers * scaling.reserved_cpus
        return settings.changed("scaling", workers=1, gpus_per_worker=gpus, cpus_per_worker=cpus)

    def done(self, row: Mapping[str, Any], training: TrainingSettings) -> int:
        """Return how much of the training a logged step has done, in steps or epochs."""
        return int(row["step"] if training.length_in == "steps" else row.get("epoch", 0))


def schedule_trace(job: TrainingJob, phases: Sequence[Phase]) -> ScheduleTrace:
    """Return a function that hashes all that decides the first steps of a training but its data.

    Two trainings with the same trace after a step compute the same steps up to it, so that a
    checkpoint of one continues the other. The function is fast if the steps rise.
    """

    def begun() -> tuple[int, Iterator[Any], hashlib._Hash]:
        return 0, steps(phases, 0), hashlib.sha256(job.identity.encode())

    done, left, digest = begun()

    def after(step: int) -> str | None:
        nonlocal done, left, digest
        if step > job.steps:
            return None
        if step < done:
            done, left, digest = begun()
        for _, phase, number, _ in islice(left, step - done):
            rate = job.task.learning_rate(job.settings.training, phase, number)
            digest.update(phase.name.encode())
            digest.update(struct.pack("<qd", phase.samples, rate))
        done = step
        return digest.hexdigest()

    return after
