"""Settings after an out-of-memory error: the fastest ones that are predicted to fit.

The prediction runs in the process of the command, on fake tensors. It records two steps for each
combination of settings, which takes a second or two each. On a CPU nothing is predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from raypipe import faults
from raypipe.errors import ConfigError, UnitError
from raypipe.hardware import Gpu, bytes_text
from raypipe.prediction import calibration
from raypipe.prediction.calibration import Calibration
from raypipe.prediction.cards import Card, cards, of_device
from raypipe.training.job import TrainingJob
from raypipe.training.recovery import changed
from raypipe.training.task import TrainTask

if TYPE_CHECKING:
    from raypipe.prediction.forecast import Forecasts
    from raypipe.training.settings import OomStep

#: time after which recording ends: a step with a long loop of small kernels takes minutes
_MOST_SECONDS = 60
#: steps that keep the loss curve, in any combination
_EXACT: tuple[OomStep, ...] = ("gradient_checkpointing", "fsdp")

#: a job and what it changes, in words
Changed = tuple[TrainingJob, tuple[str, ...]]


@dataclass(frozen=True)
class _Candidate:
    """A job that may follow, what it changes in words, and the row of its prediction."""

    job: TrainingJob
    words: tuple[str, ...]
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
        self._deadline = 0.0

    def __call__(self, job: TrainingJob, error: UnitError) -> tuple[TrainingJob, str] | None:
        """Return the job and a description; None if the fixed order of steps has to decide.

        It does for a CPU, an unlisted card, a script, a step that cannot be predicted, injected
        faults, and if nothing that ``on_oom`` allows is predicted to need less. Micro-batches only
        shrink and steps of ``on_oom`` stay, so that the attempts come to an end.
        """
        injected = faults.from_environment().oom_above is not None
        each = job.settings.scaling.gpus_per_worker
        if not (self._gpus and each and job.settings.on_oom) or injected:
            return None
        if not isinstance(job.task, TrainTask):
            return None
        try:
            card = self._card(each)
            self._say("out of memory: predicting which settings fit")
            self._deadline = time.monotonic() + _MOST_SECONDS
            return self._chosen(job, error, card)
        except ConfigError as reason:
            self._say(f"out of memory: on_oom is followed in its order: {reason}")
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
        for tier in _tiers(job):
            sized = [self._sized(*each, card, found, most) for each in tier]
            if fitting := [each for each in sized if each.fits]:
                best = max(fitting, key=lambda each: each.row["samples_per_s"])
                return best.job, best.text(speed)
            unfit += sized
        least_of_all = min(unfit, key=lambda each: each.row["peak_bytes"])
        if least_of_all.row["peak_bytes"] >= needed * found.memory:
            return None
        return least_of_all.job, f"{least_of_all.text(speed)}; nothing allowed needs less"

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
        row = forecasts.row(card, job.settings, found, micro)
        return _Candidate(replace(job, plan=cut), words, row, size is not None)

    def _of(self, job: TrainingJob) -> Forecasts:
        """Return the forecasts of a job's task, with the recordings of earlier attempts."""
        made = next((made for task, made in self._made if task is job.task), None)
        if made is None:
            made = self._make(job)
            self._made.append((job.task, made))
        made.deadline = self._deadline
        return made


def _tiers(job: TrainingJob) -> Iterator[list[Changed]]:
    """Yield what may follow: with the same results, else in bf16, else with shorter samples."""
    allowed = job.settings.on_oom
    exact = [step for step in _EXACT if step in allowed]
    if job.plan.workers == 1:
        exact = [step for step in exact if step != "fsdp"]
    words: tuple[str, ...] = ()
    while True:
        yield list(_combinations(job, words, exact))
        if "bf16" in allowed and (half := changed(job, "bf16")) is not None:
            yield list(_combinations(half[0], (*words, "bf16"), exact))
        shorter = job.task.shortened() if "shorten" in allowed else None
        if shorter is None:
            return
        job, words = replace(job, task=shorter[0]), (shorter[1],)


def _combinations(
    job: TrainingJob, words: tuple[str, ...], steps: Sequence[OomStep]
) -> Iterator[Changed]:
    """Yield a job with every combination of those steps that change it."""
    effective = [step for step in steps if changed(job, step) is not None]
    for number in range(len(effective) + 1):
        for chosen in combinations(effective, number):
            varied = job
            for step in chosen:
                varied = (changed(varied, step) or (varied, ""))[0]
            yield varied, (*(step.replace("_", " ") for step in chosen), *words)


def _forecasts(job: TrainingJob) -> Forecasts:
    from raypipe.prediction.forecast import Forecasts

    if not isinstance(job.task, TrainTask):
        raise ConfigError("another program trains")
    return Forecasts(job.task, job.settings, job.plan.effective_batch, "", lambda _: None)
