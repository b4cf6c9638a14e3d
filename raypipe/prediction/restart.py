"""Settings after an out-of-memory error: the fastest ones that are predicted to fit.

The prediction runs in the process of the command, on fake tensors. It records two steps for each
combination of settings, which takes a second or two each. On a CPU nothing is predicted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from raypipe import faults
from raypipe.errors import ConfigError, UnitError, message_of
from raypipe.hardware import Gpu, bytes_text
from raypipe.prediction import calibration
from raypipe.prediction.calibration import Calibration
from raypipe.prediction.cards import Card, cards, of_device
from raypipe.redaction import shown_traceback
from raypipe.training.job import TrainingJob
from raypipe.training.recovery import with_oom_step
from raypipe.training.task import TrainTask

if TYPE_CHECKING:
    from raypipe.prediction.forecast import Forecasts
    from raypipe.training.settings import OomStep

log = logging.getLogger(__name__)

#: time for all recordings of a choice: a step with a long loop of small kernels takes minutes
_MOST_SECONDS = 60
#: steps that keep the loss curve, in any combination
_EXACT: tuple[OomStep, ...] = ("gradient_checkpointing", "fsdp")

#: a job and what it changes, in words
Changed = tuple[TrainingJob, tuple[str, ...]]


@dataclass(frozen=True)
class _Candidate:
    """A job that may follow, what it changes in words, and its prediction.

    ``reserved`` are the bytes that torch reserves, uncalibrated: integers that compare exactly.
    """

    job: TrainingJob
    words: tuple[str, ...]
    reserved: int
    row: dict[str, Any]
    fits: bool

    def text(self, speed: float) -> str:
        """Return a description, with the speed relative to that of the failed job."""
        row, plan = self.row, self.job.plan
        sizes = f"micro-batch {plan.micro_batch} x accumulation {plan.accumulation}"
        used = bytes_text(row["peak_bytes"] + row["context_bytes"])
        times = row["samples_per_s"] / speed
        relative = f"{times:.2g} of the speed" if times < 1 else f"{times:.2g} times the speed"
        known = f"predicted {used} of {bytes_text(row['capacity_bytes'])}, {relative}"
        return f"again with {', '.join((sizes, *self.words))}: {known}"


class RestartChoice:
    """Choice of the job that follows one that ran out of GPU memory.

    Args:
        gpus: of the cluster.
        say: receives messages.
        forecasts: makes the forecasts of a job.

    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        say: Callable[[str], None],
        forecasts: Callable[[TrainingJob], Forecasts] | None = None,
    ) -> None:
        self._gpus, self._say, self._make = gpus, say, forecasts or _forecasts
        self._made: list[tuple[object, Forecasts]] = []
        self._deadline, self._failed = 0.0, False

    def __call__(self, job: TrainingJob, error: UnitError) -> tuple[TrainingJob, str] | None:
        """Return the job and a description; None if the fixed order of steps has to decide.

        Return None for a CPU, an unlisted card, a script, an elastic number of workers, a step that
        cannot be predicted, injected faults, and if nothing that ``on_oom`` allows is predicted to
        need less. After a prediction failed, none is tried again. Micro-batches only shrink and
        steps of ``on_oom`` stay, so that the attempts come to an end.
        """
        injected = faults.from_environment().oom_above is not None
        each = job.settings.scaling.gpus_per_worker
        if not (self._gpus and each and job.settings.on_oom) or injected:
            return None
        if self._failed or not isinstance(job.task, TrainTask):
            return None
        from raypipe.prediction.step import RECORDING

        try:
            _check_workers(job)
            card = self._card(each)
            self._say("out of memory: predicting which settings fit")
            with RECORDING:  # waiting for another stage's recordings is not part of the limit
                self._deadline = time.monotonic() + _MOST_SECONDS
                return self._chosen(job, error, card)
        except Exception as reason:  # a user's task may raise anything; the training goes on
            self._failed = True
            text = str(reason)
            if not isinstance(reason, ConfigError):
                text = f"the prediction failed ({message_of(reason)})"
                log.error("the settings after out of memory:\n%s", shown_traceback())  # noqa: TRY400
            self._say(f"out of memory: on_oom is followed in its order: {text}")
            return None

    def _card(self, share: float) -> Card:
        """Return the smallest card of the cluster, with a worker's share of its memory."""
        gpu = min(self._gpus, key=lambda gpu: gpu.memory_bytes)
        card = of_device(gpu.name, gpu.memory_bytes, cards().values())
        if card is None:
            raise ConfigError(f"{gpu.name} is not a listed card")
        return replace(card, memory_bytes=int(gpu.memory_bytes * min(1.0, share)))

    def _chosen(
        self, job: TrainingJob, error: UnitError, card: Card
    ) -> tuple[TrainingJob, str] | None:
        from raypipe.prediction.memory import outside, room

        if (precision := job.settings.training.precision) not in card.precisions:
            raise ConfigError(f"{precision} is not predicted")
        workers, size = job.plan.workers, job.plan.micro_batch
        forecasts, failed = self._of(job), error.limit.size if error.limit else None
        needed = forecasts.reserved(card, job.settings, size, failed)
        # what failed needs more than the card has, whatever was predicted
        found = calibration.load(card.name)
        least = (card.memory_bytes - outside(workers)) / needed
        found = replace(found, memory=max(found.memory, least))
        speed = forecasts.row(card, job.settings, found, size)["samples_per_s"]
        most = room(card, workers) / found.memory
        unfit: list[_Candidate] = []
        for tier in _tiers(job, card):
            sized = [self._sized(*each, card, found, most) for each in tier]
            sized = [each for each in sized if not _same(each.job, job)]
            if fitting := [each for each in sized if each.fits]:
                best = max(fitting, key=lambda each: each.row["samples_per_s"])
                return best.job, best.text(speed)
            unfit += sized
        smallest = min(unfit, key=lambda each: each.reserved, default=None)
        if smallest is None or smallest.reserved >= needed:
            return None
        return smallest.job, f"{smallest.text(speed)}; nothing allowed needs less"

    def _sized(
        self,
        job: TrainingJob,
        words: tuple[str, ...],
        card: Card,
        found: Calibration,
        most: float,
    ) -> _Candidate:
        """Return a job with the largest micro-batch that fits, else with the smallest one."""
        forecasts, plan = self._of(job), job.plan
        share = plan.micro_batch * plan.accumulation
        sizes = [size for size in range(plan.micro_batch, 0, -1) if share % size == 0]

        def fits(size: int) -> bool:
            return forecasts.reserved(card, job.settings, size) <= most

        size = next(filter(fits, sizes), None)
        micro = size or 1
        cut = replace(plan, micro_batch=micro, accumulation=-(-plan.largest_share // micro))
        reserved = forecasts.reserved(card, job.settings, micro)
        row = forecasts.row(card, job.settings, found, micro)
        return _Candidate(replace(job, plan=cut), words, reserved, row, size is not None)

    def _of(self, job: TrainingJob) -> Forecasts:
        """Return the forecasts of a job's task, with the recordings of earlier attempts."""
        made = next((made for task, made in self._made if task is job.task), None)
        if made is None:
            made = self._make(job)
            self._made.append((job.task, made))
        made.deadline = self._deadline
        return made


def _check_workers(job: TrainingJob) -> None:
    """Raise ConfigError if the number of workers is elastic: each number has other needs."""
    scaling = job.settings.scaling
    if scaling.fewest_workers != scaling.most_workers:
        raise ConfigError(f"scaling.workers = {scaling.workers} is elastic, which is not predicted")


def _same(one: TrainingJob, other: TrainingJob) -> bool:
    """Whether two jobs take the same step."""
    same_task = one.task is other.task and one.settings == other.settings
    return same_task and one.plan.micro_batch == other.plan.micro_batch


def _tiers(job: TrainingJob, card: Card) -> Iterator[list[Changed]]:
    """Yield what may follow: with the same results, else in bf16, else with shorter samples."""
    allowed = job.settings.on_oom
    exact = [step for step in _EXACT if step in allowed]
    if job.plan.workers == 1:
        exact = [step for step in exact if step != "fsdp"]
    words: tuple[str, ...] = ()
    while True:
        yield list(_combinations(job, words, exact))
        in_bf16 = "bf16" in allowed and "bf16" in card.precisions
        half = with_oom_step(job, "bf16") if in_bf16 else None
        if half is not None:
            yield list(_combinations(half[0], (*words, "bf16"), exact))
        shorter = job.task.shortened() if "shorten" in allowed else None
        if shorter is None:
            return
        job, words = replace(job, task=shorter[0]), (shorter[1],)


def _combinations(
    job: TrainingJob, words: tuple[str, ...], steps: Sequence[OomStep]
) -> Iterator[Changed]:
    """Yield a job with every combination of those steps that change it."""
    effective = [step for step in steps if with_oom_step(job, step) is not None]
    for number in range(len(effective) + 1):
        for chosen in combinations(effective, number):
            varied = job
            for step in chosen:
                varied = (with_oom_step(varied, step) or (varied, ""))[0]
            yield varied, (*(step.replace("_", " ") for step in chosen), *words)


def _forecasts(job: TrainingJob) -> Forecasts:
    from raypipe.prediction.forecast import Forecasts

    if not isinstance(job.task, TrainTask):
        raise ConfigError("another program trains")
    return Forecasts(job.task, job.settings, job.plan.effective_batch, "", lambda _: None)
