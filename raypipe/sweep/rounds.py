"""Rounds of a systems sweep: every point that may be the best is measured again in each round.

Everything follows from the rows of ``sweep_rounds``, so rounds continue after a kill. A command
begins a new round instead of continuing the last one of an earlier command, because points are
compared within rounds.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from raypipe.pipeline.identity import canonical_json
from raypipe.stats import finite_or_none
from raypipe.storage.ledger import Ledger, Row
from raypipe.sweep.settings import REPEATED, SweepSettings
from raypipe.sweep.space import point_key
from raypipe.sweep.standing import Standing, adjusted, standing
from raypipe.sweep.trials import Trial, shown

TABLE = "sweep_rounds"
_LEAST_S = 60.0


@dataclass(frozen=True)
class Measured:
    """The measurements of a sweep's points so far.

    ``trials`` are those of each point. ``budget_s`` is the time for all rounds after the first,
    ``spent_s`` what they have taken; ``load`` is the mean load average per core.
    """

    standing: Standing
    trials: Mapping[str, Sequence[str]]
    spent_s: float
    budget_s: float
    load: float | None
    most: int
    negligible: float
    alpha: float

    @property
    def over(self) -> str:
        """Why the rounds are over; empty if they are not."""
        found = self.standing
        if found.is_decided:
            return "decided"
        if min(found.rounds[name] for name in found.order) >= self.most:
            return f"sweep.rounds.most = {self.most} is reached"
        if self.spent_s >= self.budget_s:
            return f"the {self.budget_s:.0f} s for further rounds are over (sweep.rounds.seconds)"
        return ""

    @property
    def longer(self) -> str:
        """The overrides with which the rounds go on, about as long again."""
        most = 2 * max(self.most, *self.standing.rounds.values())
        return f"sweep.rounds.most={most} sweep.rounds.seconds={2 * self.budget_s:.0f}"


def measured(ledger: Ledger, rows: Iterable[Row], settings: SweepSettings) -> Measured | None:
    """Return the measurements of the points that may be recommended; None if there are none.

    Args:
        ledger: has the rounds.
        rows: the rows of the sweep's trials, with their parity.
        settings: the section of the configuration.

    """
    names = {
        str(row["trial_id"]): point_key(row["point"])
        for row in rows
        if row["status"] == "succeeded" and not row.get("reference")
        and not _exceeds(row.get("parity"), settings.parity_tolerance)
    }  # fmt: skip
    repeated = [row for row in ledger.rows(TABLE) if row["trial_id"] in names]
    failed = {names[row["trial_id"]] for row in repeated if row["status"] != "succeeded"}
    values: dict[str, dict[int, list[float]]] = {}
    metric = settings.metric_name
    for row in repeated:
        value = finite_or_none(row.get(metric))
        if value is not None and value > 0 and (name := names[row["trial_id"]]) not in failed:
            values.setdefault(name, {}).setdefault(row["round"], []).append(math.log(value))
    if not values:
        return None
    means = {
        name: {number: math.exp(fmean(logs)) for number, logs in of_point.items()}
        for name, of_point in values.items()
    }
    first: dict[str, Row] = {}
    for row in repeated:
        first.setdefault(row["trial_id"], row)
    first_s = sum(row["duration_s"] for row in first.values())
    loads = [row["load"] for row in repeated if row.get("load") is not None]
    options, rounds = settings.direction, settings.rounds
    return Measured(
        standing(means, options, rounds.negligible, rounds.alpha),
        {name: [t for t in names if names[t] == name] for name in values},
        spent_s=sum(row["duration_s"] for row in repeated) - first_s,
        budget_s=max(_LEAST_S, first_s) if rounds.seconds is None else rounds.seconds,
        load=fmean(loads) if loads else None,
        most=rounds.most,
        negligible=rounds.negligible,
        alpha=rounds.alpha,
    )


class Rounds:
    """The rounds of one command.

    Args:
        ledger: has the rounds of earlier commands.
        settings: the section of the configuration.
        trials: all trials by key.
        rows: the rows of the trials.
        first: the number of the first round that this command may begin.

    """

    def __init__(
        self,
        ledger: Ledger,
        settings: SweepSettings,
        trials: Mapping[str, Trial],
        rows: Mapping[str, Row],
        first: int,
    ) -> None:
        self._ledger, self._settings = ledger, settings
        self._trials, self._rows = trials, rows
        self._next = first
        self._due: deque[str] = deque()
        self._place = 0
        self._failed: set[str] = set()
        self._known: set[str] = set()
        self.number = 0
        self.is_over = False
        self._adopt()

    def _adopt(self) -> None:
        """Record the only measurement of trials that were finished without rounds."""
        known = {row["trial_id"] for row in self._ledger.rows(TABLE)}
        found: dict[str, Row] = {}
        for key, row in self._rows.items():
            if row["status"] == "succeeded" and key not in known:
                once = round_row(self._trials[key], self._settings, 0, len(found), "succeeded", row)
                found[f"{key}/0"] = {**once, "duration_s": 0.0}
        self._ledger.put(TABLE, found)

    def next(self) -> tuple[Trial | None, str]:
        """Return the next trial to measure, and what the last round showed, if one is complete.

        The caller asks for the first trial of a round when none is running. None ends the rounds.
        """
        said = ""
        if not self._due:
            found = measured(self._ledger, self._rows.values(), self._settings)
            verdict = "" if found is None else found.over
            said = "" if found is None else self._said(found, verdict)
            if found is None or verdict:
                self.is_over = True
                return None, said
            trials = [t for name in found.standing.order for t in found.trials[name]]
            going = [trial for trial in trials if trial not in self._failed]
            if len(going) < 2:
                self.is_over = True
                return None, said
            self.number, self._next, self._place = self._next, self._next + 1, 0
            self._due.extend(self._ordered(going))
        return self._trials[self._due.popleft()], said

    @property
    def has_due(self) -> bool:
        """Whether trials of the current round have not been started."""
        return bool(self._due)

    def row(self, trial_id: str, status: str, outcome: Mapping[str, Any]) -> Row:
        """Return the row of a measurement of the current round, without its duration."""
        self._place += 1
        trial, place = self._trials[trial_id], self._place - 1
        return round_row(trial, self._settings, self.number, place, status, outcome)

    def drop(self, trial_id: str) -> None:
        """Measure a trial no more in this command."""
        self._failed.add(trial_id)

    def _ordered(self, trials: Sequence[str]) -> list[str]:
        """Return the trials of a round in its order.

        Two rounds in a row have opposite orders, so that a steady drift of the machine cancels.
        Trials with the same workers stay together: they share processes.
        """
        draw = random.Random(self.number // 2)
        groups: dict[str, list[str]] = {}
        for trial in sorted(trials):
            scaling = self._trials[trial].training.settings.scaling.model_dump(mode="json")
            groups.setdefault(canonical_json(scaling), []).append(trial)
        blocks = [groups[key] for key in sorted(groups)]
        draw.shuffle(blocks)
        for block in blocks:
            draw.shuffle(block)
        found = [trial for block in blocks for trial in block]
        return found[::-1] if self.number % 2 else found

    def _said(self, found: Measured, verdict: str) -> str:
        """Return what a round showed: the points that it dropped, and what is left."""
        state = found.standing
        if len(state.centers) < 2:
            return ""
        lines = []
        for name, better in state.dropped.items():
            if name not in self._known:
                self._known.add(name)
                lines.append(
                    f"dropped: {self._name(found, name)}, worse than {self._name(found, better)}"
                )
        left = f"{len(state.order)} of {len(state.centers)} points may be the best"
        rounds = max(state.rounds.values())
        text = (
            f"{rounds} round{'s' * (rounds != 1)}: {left}, ahead: {self._name(found, state.best)}"
        )
        return "\n".join([*lines, f"{text}; {verdict}" if verdict else text])

    def _name(self, found: Measured, name: str) -> str:
        value = found.standing.centers[name]
        return f"{shown(self._trials[found.trials[name][0]].point)} ({value:.4g})"


def round_row(
    trial: Trial,
    settings: SweepSettings,
    number: int,
    place: int,
    status: str,
    outcome: Mapping[str, Any],
) -> Row:
    """Return the row of a measurement, without its duration."""
    columns = (*REPEATED, "speed_spread", "load")
    return {
        "trial_id": trial.unit.key,
        "trained_stage": settings.stage,
        "round": number,
        "place": place,
        "status": status,
        **{name: outcome.get(name) for name in columns},
    }


def last_round(ledger: Ledger) -> int:
    """Return the number of the last round of any command; 0 without one."""
    return max((int(row["round"]) for row in ledger.rows(TABLE)), default=0)


def forget(ledger: Ledger, trial_id: str) -> None:
    """Remove the measurements of a trial that is outdated."""
    ledger.remove(TABLE, [key for key, row in ledger.items(TABLE) if row["trial_id"] == trial_id])


def adjusted_columns(ledger: Ledger, trial_ids: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the measures of each trial at the mean conditions of all rounds."""
    wanted = set(trial_ids)
    rows = [r for r in ledger.rows(TABLE) if r["trial_id"] in wanted and r["status"] == "succeeded"]
    found: dict[str, dict[str, float]] = {}
    for column in REPEATED:
        values: dict[str, dict[int, float]] = {}
        for row in rows:
            value = finite_or_none(row.get(column))
            if value is not None and value > 0:
                values.setdefault(row["trial_id"], {})[row["round"]] = value
        for trial_id, value in adjusted(values).items() if values else ():
            found.setdefault(trial_id, {})[column] = value
    return found


def _exceeds(parity: float | None, tolerance: float) -> bool:
    return parity is not None and not parity <= tolerance
