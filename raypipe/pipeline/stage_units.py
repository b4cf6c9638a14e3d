"""Units of a running stage: which are finished, can be computed, or wait for other stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from raypipe.pipeline.continuation import is_outdated
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.storage.ledger import Ledger

if TYPE_CHECKING:
    from raypipe.pipeline.scheduler import Outcomes


def is_done(ledger: Ledger, unit: Unit) -> bool:
    """Whether a unit's result is stored, for its whole budget, and not out of date."""
    stored = ledger.get("units", unit.key)
    if stored is None or stored["status"] != "succeeded" or is_outdated(stored, unit):
        return False
    return bool(stored["budget"] >= unit.budget)


def all_stored(stages: Iterable[Stage], ledger: Ledger) -> bool:
    """Whether every unit of these stages is finished."""
    return all(is_done(stage.seen(ledger), unit) for stage in stages for unit in stage.units)


class StageUnits:
    """The units of a stage.

    Args:
        stage: the stage.
        ledger: holds the finished units.
        outcomes: the stages that have ended; None if all that this one needs have succeeded.

    """

    def __init__(self, stage: Stage, ledger: Ledger, outcomes: Outcomes | None) -> None:
        self._stage, self._ledger, self._outcomes = stage, ledger, outcomes
        self.named = {unit.key: unit for unit in stage.units}
        self._needs = {unit.key: stage.needed_by(unit) for unit in stage.units}
        self._offered: set[str] = set()
        self._ended = 0

    def unfinished(self) -> list[Unit]:
        """Return the units that are not finished, in order."""
        return [unit for unit in self._stage.units if not is_done(self._ledger, unit)]

    def todo(self) -> list[Unit]:
        """Return the units that are not finished and whose needs are done, in order."""
        ready = self._ready()
        self._offered.update(unit.key for unit in ready)
        return ready

    def further(self) -> list[Unit]:
        """Return units to compute that neither this nor ``todo`` has returned."""
        ended = 0 if self._outcomes is None else self._outcomes.ended
        if ended == self._ended:  # fast: no stage has ended since
            return []
        self._ended = ended
        before = set(self._offered)
        return [unit for unit in self.todo() if unit.key not in before]

    def await_further(self) -> bool:
        """Wait until there are further units to compute; return False if there will be none.

        Raises:
            KeyboardInterrupt: the run is interrupted.

        """
        while True:
            needs = self._running_needs()  # before the units: stages end meanwhile
            if any(unit.key not in self._offered for unit in self._ready()):
                return True
            if self._outcomes is None or not needs:
                return False
            self._outcomes.wait(needs)

    def failed_needs(self) -> list[str]:
        """Return the stages that unfinished units need and that failed."""
        if self._outcomes is None or self._stage.after_failures:
            return []
        needs = {need for unit in self.unfinished() for need in self._needs[unit.key]}
        return self._outcomes.failed(sorted(needs))

    def _ready(self) -> list[Unit]:
        outcomes = self._outcomes
        if outcomes is None:
            return self.unfinished()
        ready = (u for u in self.unfinished() if not outcomes.running(self._needs[u.key]))
        return [
            unit
            for unit in ready
            if self._stage.after_failures or not outcomes.failed(self._needs[unit.key])
        ]

    def _running_needs(self) -> set[str]:
        """Return the running stages that unfinished units wait for."""
        outcomes, running = self._outcomes, set[str]()
        if outcomes is not None:
            for unit in self.unfinished():
                if not outcomes.failed(self._needs[unit.key]):
                    running |= outcomes.running(self._needs[unit.key])
        return running
