"""Forecast of a training on a card: the largest micro-batch that fits, its speed and energy."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from raypipe.cards import peak_memory
from raypipe.cards.dry_run import StepCase, has_blocks, record
from raypipe.cards.recorder import Recording
from raypipe.cards.speed import EXPECTED, FASTEST, SLOWEST, step_time, watts
from raypipe.training.data_sheets import Card
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import TrainTask

#: parts of the peak that have a column
_PARTS = ("parameters", "gradients", "optimizer", "others")
#: the compute capability from which on torch has flash attention, and one before it
_FLASH, _OLDER = 8.0, 7.0
#: micro-batches of the recordings: these parts of the largest one, or of the limit
_FRACTIONS, _LARGEST = (4, 2), 64
#: settings of a training that its recordings do not depend on
_SAME_STEP = {
    *("micro_batch", "accumulation", "effective_batch", "steps", "epochs", "seed"),
    *("learning_rate", "min_lr_ratio", "warmup_steps", "log_every", "eval_every", "eval_batch"),
}


class Forecasts:
    """Forecasts of one training on cards, which share the recordings of its steps.

    A recording takes seconds, so there are two per phase and setting. What lies between them, or
    beyond, is linear in the micro-batch. Where the two differ in more than sizes, each micro-batch
    in question is recorded.

    Args:
        task: the training.
        settings: of the stage, with the number of workers.
        effective_batch: samples per optimizer step.
        say: receives a line before each recording.

    """

    def __init__(
        self,
        task: TrainTask,
        settings: TrainStageSettings,
        effective_batch: int,
        say: Callable[[str], None],
    ) -> None:
        self._task, self._say = task, say
        self._effective_batch = effective_batch
        self._workers = settings.scaling.worker_count
        self._phases = list(task.phases(settings.training, effective_batch))
        self._numbers = range(len(self._phases))
        self._recordings: dict[Any, Recording] = {}

    @property
    def most(self) -> int:
        """The largest micro-batch: a worker's share of a step."""
        return -(-max(phase.samples for phase in self._phases) // self._workers)

    @cached_property
    def has_blocks(self) -> bool:
        """Whether activations can be recomputed, and weights be sharded, block by block."""
        return has_blocks(self._task)

    def row(
        self, card: Card, settings: TrainStageSettings, size: int | None = None
    ) -> dict[str, Any]:
        """Return the prediction of a training with these settings on a card, without its stage.

        Args:
            card: the card of each worker.
            settings: of the training.
            size: the micro-batch; by default the largest that fits.

        Raises:
            ConfigError: the task cannot be recorded.

        """
        size = size or self._largest(card, settings)
        peaks = (self._peak(card, settings, number, size or 1) for number in self._numbers)
        peak = max(peaks, key=Counter.total)
        training = settings.training
        columns = {
            "card": card.name,
            "precision": training.precision,
            "workers": self._workers,
            "strategy": settings.scaling.strategy,
            "gradient_checkpointing": training.gradient_checkpointing,
            "compile": training.compile,
            "optimizer": training.optimizer,
            "micro_batch": size,
            "effective_batch": self._effective_batch,
            "peak_bytes": peak.total(),
            **{f"{part}_bytes": peak[part] for part in _PARTS},
            "context_bytes": peak_memory.outside(self._workers),
            "capacity_bytes": card.memory_bytes,
        }
        if size is None:
            return columns | {"note": "predicted: micro-batch 1 does not fit"}
        share = -(-self._effective_batch // self._workers)
        columns["accumulation"] = -(-share // min(size, share))
        return columns | self._speed(card, settings, size) | {"note": "predicted"}

    def _speed(self, card: Card, settings: TrainStageSettings, size: int) -> dict[str, Any]:
        """Return the columns of speed, time and energy."""
        precision, replicas = settings.training.precision, self._replicas(settings)
        steps = samples = seconds = least_s = most_s = joules = operations = 0.0
        for number, phase in enumerate(self._phases):
            recording = self._step(card, settings, number, size)
            own, runs = self._cut(number, size)
            timed = partial(step_time, recording, card, precision, runs, replicas=replicas)
            expected, fastest, slowest = map(timed, (EXPECTED, FASTEST, SLOWEST))
            seconds += phase.steps * expected.seconds
            least_s += phase.steps * fastest.seconds
            most_s += phase.steps * slowest.seconds
            joules += phase.steps * expected.seconds * watts(card, expected)
            steps += phase.steps
            samples += phase.steps * phase.samples
            operations += phase.steps * phase.samples * recording.flops / own
        peak = self._workers * card.peaks[precision]
        return {
            "step_time_s": seconds / steps,
            "samples_per_s": samples / seconds,
            "samples_per_s_low": samples / most_s,
            "samples_per_s_high": samples / least_s,
            "mfu": operations / seconds / peak,
            "hours": seconds / 3600,
            "energy_kwh": self._workers * joules / 3.6e6,
        }

    def _largest(self, card: Card, settings: TrainStageSettings) -> int | None:
        """Return the largest micro-batch that fits in every phase; None if 1 does not."""

        def fits(size: int) -> bool:
            limit = peak_memory.most_reserved(card, self._workers)
            return all(self._peak(card, settings, n, size).total() <= limit for n in self._numbers)

        if fits(self.most):
            return self.most
        sizes = range(1, self.most)
        fitting = bisect_left(sizes, True, key=lambda size: not fits(size))  # counts those that do
        if not fitting:
            return None
        share = -(-self._effective_batch // self._workers)
        return -(-share // -(-share // fitting))  # micro-batches of a step are equally large

    def _peak(
        self, card: Card, settings: TrainStageSettings, number: int, size: int
    ) -> Counter[str]:
        """Return the memory of a phase at a micro-batch, by part."""
        recording = self._step(card, settings, number, size)
        hopper, bucketed = card.capability >= peak_memory.HOPPER, self._replicas(settings) > 1
        return peak_memory.peak_parts(recording, hopper=hopper, bucketed=bucketed)

    def _replicas(self, settings: TrainStageSettings) -> int:
        return self._workers if settings.scaling.strategy == "ddp" else 1

    def _cut(self, number: int, size: int) -> tuple[int, int]:
        """Return the micro-batch of a phase, at most a worker's share of it, and their number."""
        share = -(-self._phases[number].samples // self._workers)
        return min(size, share), -(-share // min(size, share))

    def _step(self, card: Card, settings: TrainStageSettings, number: int, size: int) -> Recording:
        """Return the recording of a phase at a micro-batch, on the line through two if possible.

        Where the two differ in more than sizes, as with another number of chunks, there is none.
        """
        size, runs = self._cut(number, size)
        share = -(-self._phases[number].samples // self._workers)
        lower, upper = (max(1, min(_LARGEST // part, share // part)) for part in _FRACTIONS)
        upper = max(upper, min(share, lower + 1))
        if size not in (lower, upper):
            ends = (self._recording(card, settings, number, end, runs) for end in (lower, upper))
            step = peak_memory.between(*ends, (size - lower) / (upper - lower))
            if step is not None:
                return step
        return self._recording(card, settings, number, size, runs)

    def _recording(
        self, card: Card, settings: TrainStageSettings, number: int, size: int, runs: int
    ) -> Recording:
        """Return the recording of a phase, from those that were made if it is among them."""
        training = settings.training
        kind = "fp32" if training.precision == "tf32" else training.precision
        training = training.model_copy(update={"precision": kind, "compile": False})
        flash = _FLASH if card.capability >= _FLASH else _OLDER
        accumulation = min(runs, 2)
        decisive = training.model_dump_json(exclude=_SAME_STEP)
        key = (decisive, settings.scaling.strategy, flash, number, size, accumulation)
        if key not in self._recordings:
            phase = self._phases[number]
            step = sum(each.steps for each in self._phases[:number])
            self._say(f"{phase.name}, {kind}: recording a step at micro-batch {size}")
            settings = settings.model_copy(update={"training": training})
            case = StepCase(settings, phase, step, size, accumulation, self._workers, flash)
            self._recordings[key] = record(self._task, case)
        return self._recordings[key]
