"""Forecast of a training on a card: the largest micro-batch that fits, its speed and energy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from raypipe.cards import memory as memories
from raypipe.cards.calibration import Calibration
from raypipe.cards.memory import Memory
from raypipe.cards.recorder import Recording
from raypipe.cards.speed import EXPECTED, FASTEST, SLOWEST, StepTime, step_time, watts
from raypipe.cards.step import StepCase, has_blocks, record
from raypipe.training.data_sheets import Card
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import TrainTask

#: parts of the peak by the columns of the table; all others are temporaries
_COLUMNS = {
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "exchange buckets": "gradients_bytes",
    "optimizer state": "optimizer_bytes",
    "activations": "activations_bytes",
    "logits and loss": "logits_bytes",
    "allocator": "allocator_bytes",
}
#: the compute capability from which on torch has flash attention, and one before it
_FLASH, _OLDER = 8.0, 7.0
#: micro-batches of the recordings: these parts of the largest one, or of the limit
_FRACTIONS, _LARGEST = (4, 2), 64
#: settings of a training that its recordings do not depend on
_SAME_STEP = {
    *("micro_batch", "accumulation", "effective_batch", "steps", "epochs", "seed"),
    *("learning_rate", "min_lr_ratio", "warmup_steps", "log_every", "eval_every", "eval_batch"),
}

#: a micro-batch as recordings, each with its own micro-batch and a weight; the weights sum to 1
Mixture = list[tuple[Recording, int, float]]


class Forecasts:
    """Forecasts of one training on cards, which share the recordings of its steps.

    A recording takes seconds, so there are two per phase and setting. What lies between them, or
    beyond, is linear in the micro-batch. Where the two differ in more than sizes, those of the
    smallest and of the largest micro-batch are added.

    Args:
        task: the training.
        settings: of the stage, with the number of workers.
        effective_batch: samples per optimizer step.
        key: tells the training apart from others.
        say: receives a line before each recording.

    """

    def __init__(
        self,
        task: TrainTask,
        settings: TrainStageSettings,
        effective_batch: int,
        key: str,
        say: Callable[[str], None],
    ) -> None:
        self.key = key
        self._task, self._say = task, say
        self._effective_batch = effective_batch
        self._workers = settings.scaling.worker_count
        self._phases = list(task.phases(settings.training, effective_batch))
        self._recordings: dict[Any, Recording] = {}
        self._between: dict[tuple[int, int, int], Recording | None] = {}

    @property
    def most(self) -> int:
        """The largest micro-batch: a worker's share of a step."""
        return -(-max(phase.samples for phase in self._phases) // self._workers)

    @cached_property
    def has_blocks(self) -> bool:
        """Whether activations can be recomputed, and weights be sharded, block by block."""
        return has_blocks(self._task)

    @property
    def shards(self) -> bool:
        """Whether several workers can shard the model."""
        return self._workers > 1 and self.has_blocks

    def row(
        self,
        card: Card,
        settings: TrainStageSettings,
        found: Calibration,
        size: int | None = None,
    ) -> dict[str, Any]:
        """Return the prediction of a training with these settings on a card, without its stage.

        Args:
            card: the card of each worker.
            settings: of the training.
            found: the calibration of the card.
            size: the micro-batch; by default the largest that fits.

        Raises:
            ConfigError: the task cannot be recorded.

        """
        size = size or self._largest(card, settings, found)
        numbers = range(len(self._phases))
        peak = max(
            (self._memory(card, settings, number, size or 1) for number in numbers),
            key=lambda each: each.reserved,
        )
        training = settings.training
        parts = dict.fromkeys((*_COLUMNS.values(), "temporaries_bytes"), 0)
        for part, held in peak.parts.items():
            parts[_COLUMNS.get(part, "temporaries_bytes")] += held
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
            "peak_bytes": round(peak.reserved * found.memory),
            **parts,
            "context_bytes": memories.outside(self._workers),
            "capacity_bytes": card.memory_bytes,
            "measurements": found.number,
        }
        if size is None:
            return columns | {"note": f"micro-batch 1 does not fit; {found.text}"}
        share = -(-self._effective_batch // self._workers)
        columns["accumulation"] = -(-share // min(size, share))
        return columns | self._speed(card, settings, size, found) | {"note": found.text}

    def reserved(self, card: Card, settings: TrainStageSettings, size: int) -> int:
        """Return the bytes that torch reserves at a micro-batch, uncalibrated.

        Raises:
            ConfigError: the task cannot be recorded.

        """
        numbers = range(len(self._phases))
        return max(self._memory(card, settings, number, size).reserved for number in numbers)

    def _speed(
        self, card: Card, settings: TrainStageSettings, size: int, found: Calibration
    ) -> dict[str, Any]:
        """Return the columns of speed, time, energy and price."""
        numbers = range(len(self._phases))
        times = [self._times(card, settings, number, size) for number in numbers]
        timed = list(zip(self._phases, times, strict=True))
        expected, fastest, slowest = (
            sum(phase.steps * each[n].seconds for phase, each in timed) for n in range(3)
        )
        samples = sum(phase.steps * phase.samples for phase in self._phases)
        low, high = samples / slowest, samples / fastest
        if found.speed_range is not None:
            low, high = (samples / expected * end for end in found.speed_range)
        seconds = expected / found.speed
        hours = seconds / 3600
        joules = sum(
            phase.steps * each[0].seconds / found.speed * watts(card, each[0])
            for phase, each in timed
        )
        operations = sum(
            phase.steps * phase.samples * self._flops(card, settings, number, size)
            for number, phase in enumerate(self._phases)
        )
        peak = self._workers * card.peaks[settings.training.precision]
        price = card.price_per_hour
        return {
            "step_time_s": seconds / sum(phase.steps for phase in self._phases),
            "samples_per_s": samples / seconds,
            "samples_per_s_low": low,
            "samples_per_s_high": high,
            "mfu": operations / seconds / peak,
            "hours": hours,
            "hours_low": samples / high / 3600,
            "hours_high": samples / low / 3600,
            "energy_kwh": self._workers * joules / 3.6e6,
            "cost": None if price is None else price * hours * self._workers,
        }

    def _largest(self, card: Card, settings: TrainStageSettings, found: Calibration) -> int | None:
        """Return the largest micro-batch that fits in every phase; None if 1 does not."""
        limit = memories.room(card, self._workers) / found.memory

        def fits(size: int) -> bool:
            memory = (
                self._memory(card, settings, number, size) for number in range(len(self._phases))
            )
            return all(each.fits and each.reserved <= limit for each in memory)

        if fits(self.most):
            return self.most
        fitting, too_large = 0, self.most
        while too_large - fitting > 1:
            middle = (fitting + too_large) // 2
            if fits(middle):
                fitting = middle
            else:
                too_large = middle
        if not fitting:
            return None
        share = -(-self._effective_batch // self._workers)
        return -(-share // -(-share // fitting))  # micro-batches of a step are equally large

    def _memory(self, card: Card, settings: TrainStageSettings, number: int, size: int) -> Memory:
        """Return the memory of a phase at a micro-batch."""
        mixture = self._mixture(card, settings, number, size)
        how = {"bucketed": self._replicas(settings) > 1, "alone": len(mixture) == 1}
        found = [
            (memories.memory(each, card, self._workers, **how), weight)
            for each, _, weight in mixture
        ]
        if len(found) == 1:
            return found[0][0]
        reserved = round(sum(weight * each.reserved for each, weight in found))
        parts = {
            name: max(0, round(sum(weight * each.parts.get(name, 0) for each, weight in found)))
            for name in {name for each, _ in found for name in each.parts}
        }
        return Memory(reserved, parts, reserved <= memories.room(card, self._workers))

    def _times(
        self, card: Card, settings: TrainStageSettings, number: int, size: int
    ) -> list[StepTime]:
        """Return the time of a phase's step: expected, fastest and slowest."""
        training, replicas = settings.training, self._replicas(settings)
        _, runs = self._cut(number, size)
        mixture = self._mixture(card, settings, number, size)
        found = []
        for factors in (EXPECTED, FASTEST, SLOWEST):
            time = partial(step_time, compiled=training.compile, replicas=replicas)
            given = card, training.precision, runs, factors
            times = [(time(each, *given), weight) for each, _, weight in mixture]
            found.append(
                StepTime(
                    sum(weight * each.seconds for each, weight in times),
                    sum(weight * each.busy_s for each, weight in times),
                )
            )
        return found

    def _flops(self, card: Card, settings: TrainStageSettings, number: int, size: int) -> float:
        """Return the model FLOPs of a sample of a phase, from the recordings of a micro-batch."""
        mixture = self._mixture(card, settings, number, size)
        return sum(w * each.flops for each, _, w in mixture) / self._cut(number, size)[0]

    def _replicas(self, settings: TrainStageSettings) -> int:
        return self._workers if settings.scaling.strategy == "ddp" else 1

    def _cut(self, number: int, size: int) -> tuple[int, int]:
        """Return the micro-batch of a phase, at most a worker's share of it, and their number."""
        share = -(-self._phases[number].samples // self._workers)
        return min(size, share), -(-share // min(size, share))

    def _mixture(self, card: Card, settings: TrainStageSettings, number: int, size: int) -> Mixture:
        """Return recordings whose weighted sums are those of a micro-batch."""
        size, runs = self._cut(number, size)
        share = -(-self._phases[number].samples // self._workers)
        lower, upper = (max(1, min(_LARGEST // part, share // part)) for part in _FRACTIONS)
        upper = max(upper, min(share, lower + 1))
        one = self._recording(card, settings, number, lower, runs)
        if size == lower or lower == upper:
            return [(one, lower, 1.0)]
        two = self._recording(card, settings, number, upper, runs)
        if size == upper:
            return [(two, upper, 1.0)]
        weight = (size - lower) / (upper - lower)
        key = (id(one), id(two), size)
        if key not in self._between:
            self._between[key] = memories.between(one, two, weight)
        if (found := self._between[key]) is not None:
            return [(found, size, 1.0)]
        # the two have different operations, as with another number of chunks: add weighted results
        # of the recordings on both sides of the micro-batch
        if size < lower:
            lower, upper, two = 1, lower, one
            one = self._recording(card, settings, number, lower, runs)
        elif size > upper:
            lower, upper, one = upper, share, two
            two = self._recording(card, settings, number, upper, runs)
        weight = (size - lower) / (upper - lower)
        mixture = [(one, lower, 1 - weight), (two, upper, weight)]
        return [each for each in mixture if each[2]]

    def _recording(
        self, card: Card, settings: TrainStageSettings, number: int, size: int, runs: int
    ) -> Recording:
        """Return the recording of a phase, from those that were made if it is among them."""
        training = settings.training
        kind = "fp32" if training.precision == "tf32" else training.precision
        training = training.model_copy(update={"precision": kind, "compile": False})
        flash = _FLASH if card.capability >= _FLASH else _OLDER
        sharded = settings.scaling.strategy == "fsdp" and self._workers > 1
        # without sharding, a step of one micro-batch is part of one of two
        accumulation = min(runs, 2) if sharded else 2
        decisive = training.model_dump_json(exclude=_SAME_STEP)
        key = (decisive, settings.scaling.strategy, flash, number, size, accumulation)
        if key not in self._recordings:
            phase = self._phases[number]
            step = sum(each.steps for each in self._phases[:number])
            self._say(f"{phase.name}, {kind}: recording a step at micro-batch {size}")
            settings = settings.model_copy(update={"training": training})
            case = StepCase(settings, phase, step, size, accumulation, self._workers, flash)
            self._recordings[key] = record(self._task, case)
        if sharded or runs > 1:
            return self._recordings[key]
        if (*key, "alone") not in self._recordings:
            self._recordings[*key, "alone"] = self._recordings[key].without_accumulation()
        return self._recordings[*key, "alone"]
