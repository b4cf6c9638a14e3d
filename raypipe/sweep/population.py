"""Population-based training: members copy better ones and perturb their settings.

The method is that of Jaderberg et al. 2017 ("Population Based Training of Neural Networks"), in
generations. Every member trains for an interval. Then each of the worst quarter continues from the
checkpoint of one of the best quarter, with that member's settings resampled or perturbed by a
fifth, as in the paper. Ray Tune's scheduler decides as results arrive and keeps its decisions in
the driver's memory. Here decisions follow from the recorded rows of a generation alone: a sweep
continues after a kill, and the speed of trials makes no difference.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raypipe.config.axes import AxisSettings, Value
from raypipe.errors import ConfigError
from raypipe.pipeline.experiment import Training
from raypipe.pipeline.identity import Identity
from raypipe.storage.ledger import Row
from raypipe.sweep.objective import Objective
from raypipe.sweep.space import Point, place, points
from raypipe.sweep.trials import Trial, TrialMaker, shown, trial_unit
from raypipe.training.task import ExternalTask

#: settings that may change during a training: they alter neither the model nor its samples
CHANGEABLE = ("learning_rate", "weight_decay", "betas", "clip_norm")
_QUARTER = 0.25
_RESAMPLED = 0.25
_FACTORS = (0.8, 1.2)


class Population:
    """Generations of a population: one trial per member and interval.

    Args:
        maker: makes trials from points.
        objective: decides which members are better.
        name: the name of this search in its rows.
        interval: steps per generation.
        steps: steps of a whole training.

    """

    def __init__(
        self, maker: TrialMaker, objective: Objective, name: str, interval: int, steps: int
    ) -> None:
        self._maker, self._objective, self._name = maker, objective, name
        self._interval, self._steps = interval, steps
        self._axes = {maker.key(key): axis for key, axis in maker.sweep.axes.items()}
        self._generation = 0
        self._members: list[Trial] = []
        self._rows: dict[str, Row | None] = {}
        self._about: dict[str, dict[str, Any]] = {}
        self._spent: list[str] = []
        self._due: deque[Trial] = deque()
        start = points(self._axes, maker.sweep.samples, maker.sweep.seed)
        self._begin([(point, None) for point in start])

    @property
    def total(self) -> int:
        """The number of trials."""
        return self._maker.sweep.samples * math.ceil(self._steps / self._interval)

    @property
    def is_over(self) -> bool:
        """Whether all trials were proposed, or no member can continue."""
        return not self._due and (self._is_last or (self._is_reported and not self._ranked()))

    def ask(self) -> Trial | None:
        """Return the next trial; None while the generation is running, and at the end."""
        if not self._due and self._is_reported and not self.is_over:
            self._breed()
        return self._due.popleft() if self._due else None

    def tell(self, trial: Trial, row: Row | None) -> None:
        """Record the outcome of a trial."""
        self._rows[trial.unit.key] = row

    def about(self, trial: Trial) -> dict[str, Any]:
        """The columns that say which part of the search a trial is."""
        return self._about[trial.unit.key]

    def spent(self, trial: Trial) -> list[str]:
        """Return the trials whose checkpoints are no longer needed after this outcome."""
        del trial
        if any(self._rows.get(member.unit.key) is None for member in self._members):
            return []  # not finished: the next command runs it again
        own = [member.unit.key for member in self._members] if self._is_last else []
        return self._spent + own

    @property
    def _until(self) -> int:
        return min((self._generation + 1) * self._interval, self._steps)

    @property
    def _is_last(self) -> bool:
        return self._until == self._steps

    @property
    def _is_reported(self) -> bool:
        return all(member.unit.key in self._rows for member in self._members)

    def _ranked(self) -> list[int]:
        """Return the members that can continue, the best first."""
        costs = {}
        for number, member in enumerate(self._members):
            row = self._rows[member.unit.key]
            if row is None or row["status"] != "succeeded":
                continue
            if (cost := self._objective.cost(row)) is not None:
                costs[number] = cost
        return sorted(costs, key=lambda number: (costs[number], number))

    def _breed(self) -> None:
        """Make the next generation."""
        ranked = self._ranked()
        size = len(self._members)
        part = min(math.ceil(size * _QUARTER), size // 2)
        best, going_on = ranked[:part] or ranked[:1], set(ranked[: max(1, size - part)])
        generation, seed = self._generation + 1, self._maker.sweep.seed
        following: list[tuple[Point, Trial | None]] = []
        for number, member in enumerate(self._members):
            if number in going_on:
                following.append((member.point, member))
                continue
            rng = np.random.default_rng([seed, generation, number])
            parent = self._members[int(rng.choice(best))]
            following.append((explored(self._axes, parent.point, rng), parent))
        self._spent = [member.unit.key for member in self._members]
        self._generation = generation
        self._begin(following)

    def _begin(self, following: Sequence[tuple[Point, Trial | None]]) -> None:
        self._members = []
        for number, (point, parent) in enumerate(following):
            trial = self._maker.trial(point)
            if trial is None:
                raise ValueError(f"{shown(point)}: the constraints rule it out")
            origin = None if parent is None else parent.unit.key
            which: dict[str, Any] = {"generation": self._generation, "member": number}
            which |= {"parent": origin, "until": self._until}
            # members of a larger population differ, so it does not share these trials
            whose = {"search": self._name, "members": self._maker.sweep.samples}
            own = trial.identity
            population = {**own.literals, "population": {**which, **whose}}
            identity = Identity.of(own.shared, population, own.needs)
            unit = trial_unit(self._maker.sweep.stage, identity)
            self._members.append(replace(trial, unit=unit, until=self._until, parent=origin))
            self._about[unit.key] = {"search": self._name, **which}
        self._due.extend(self._members)


def explored(
    axes: Mapping[str, AxisSettings], point: Point, generator: np.random.Generator
) -> Point:
    """Return a point near another one: each axis is resampled or perturbed."""
    found: Point = {}
    for key, axis in axes.items():
        resampled, up = generator.random() < _RESAMPLED, bool(generator.random() < 0.5)
        share = float(generator.random())
        found[key] = place(axis, share) if resampled else _beside(axis, point[key], up=up)
    return found


def _beside(axis: AxisSettings, value: Value, *, up: bool) -> Value:
    """Return a value a fifth larger or smaller, or a neighboring choice, within the axis."""
    if axis.choice is not None:
        position = axis.choice.index(value) + (1 if up else -1)
        return axis.choice[min(max(position, 0), len(axis.choice) - 1)]
    if not isinstance(value, int | float) or axis.low is None or axis.high is None:
        raise ValueError(f"{value!r} is not a value of a range")
    moved = min(max(value * _FACTORS[up], axis.low), axis.high)
    return round(moved) if axis.is_integer else float(moved)


def check_changeable(maker: TrialMaker, training: Training) -> None:
    """Reject axes that cannot change during a training. Raises ConfigError."""
    stage, origin = maker.sweep.stage, maker.configuration.origin
    if isinstance(training.task(None), ExternalTask):
        raise ConfigError(
            f"{origin}: sweep.scheduler = pbt: {stage} is a script, which cannot continue the "
            "training of another one; take asha or median"
        )
    monitor = training.settings.training.monitor
    if monitor is not None and (monitor.patience or 0) >= 1:
        raise ConfigError(
            f"{origin}: {stage}.training.monitor.patience: scheduler = pbt trains every member to "
            "the end; set it to null"
        )
    allowed = {f"{stage}.training.{name}" for name in CHANGEABLE}
    for name in maker.sweep.axes:
        if maker.key(name) not in allowed:
            raise ConfigError(
                f"{origin}: sweep.axes: {name}: scheduler = pbt changes it while a training goes "
                f"on, and can do so with training.{{{', '.join(CHANGEABLE)}}} alone"
            )


def lineage(row: Row, rows: Mapping[str, Row]) -> str:
    """Return the history of a member's settings as a sentence; empty if they never changed."""
    parts: list[tuple[int, Point]] = []
    current: Row | None = row
    while current is not None and current.get("until") is not None:
        parts.append((current["until"], current["point"]))
        current = rows.get(current["parent"])
    parts.reverse()
    changes = [
        f"{shown(point)} to step {until}"
        for number, (until, point) in enumerate(parts)
        if number + 1 == len(parts) or parts[number + 1][1] != point
    ]
    if len(changes) <= 1:
        return ""
    return f"Mind that these are the last of the settings it trained with: {', '.join(changes)}"
