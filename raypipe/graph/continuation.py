"""Continuation: which stored results a unit begins with, and which are out of date.

A stored result may be continued if it is a prefix of the new one: a fresh computation would begin
with the same steps. A unit says so by its budget, and by whether it is extensible. What depends on
it is computed again once it has gone on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from raypipe.graph.experiment import Stage, Unit
    from raypipe.store.ledger import Ledger, Row
    from raypipe.store.run_directory import RunDirectory

#: the ledger's table of the shared parts of identities, by their hash
IDENTITIES = "identities"
#: status of a unit that is not finished, whose parts are of its identity and needs
BEGUN = "begun"
#: status of a finished unit that is being continued to a larger budget
CONTINUED = "continued"


def is_outdated(stored: Row, unit: Unit) -> bool:
    """Whether a stored result is of another identity, or what it needs has gone on since."""
    same = stored["fingerprint"] == unit.fingerprint
    return not same or stored.get("extents", {}) != unit.extents


def continues(stored: Row, unit: Unit) -> bool:
    """Whether the unit begins with a stored result of its identity, which may be all of it."""
    if stored["extensible"]:
        return bool(stored["budget"] <= unit.budget)
    return bool(stored["budget"] == unit.budget)


def is_continued(stored: Row | None, unit: Unit) -> bool:
    """Whether a unit continues a finished one."""
    if stored is None or stored["status"] == BEGUN:
        return False
    return not is_outdated(stored, unit) and continues(stored, unit)


def is_done(ledger: Ledger, unit: Unit) -> bool:
    """Whether a unit's result is stored, for its whole budget, and not out of date."""
    stored = ledger.get("units", unit.key)
    if stored is None or stored["status"] != "succeeded" or is_outdated(stored, unit):
        return False
    return bool(stored["budget"] >= unit.budget)


def all_stored(stages: Iterable[Stage], ledger: Ledger) -> bool:
    """Whether every unit of these stages is finished."""
    return all(is_done(stage.seen(ledger), unit) for stage in stages for unit in stage.units)


def refuse_lost_states(
    run_dir: RunDirectory, ledger: Ledger, stages: Sequence[Stage], where: str
) -> None:
    """Refuse to continue a finished training whose last state is not stored.

    Raises:
        ConfigError: the training, and what to do.

    """
    for stage in stages:
        for unit in stage.units if stage.training is not None else ():
            stored = stage.seen(ledger).get("units", unit.key)
            if stored is None or not is_continued(stored, unit):
                continue
            if stored["status"] != CONTINUED and stored["budget"] == unit.budget:
                continue
            files = stage.files(run_dir)
            names = files.list(files.checkpoints(unit.key))
            if not any(name.startswith("step_") for name in names):
                raise ConfigError(
                    f"{where}: {stage.key} cannot be continued from {stored['budget']} to "
                    f"{unit.budget} ({unit.budget_key}): its last checkpoint is not stored. It is "
                    f"missing if {stage.name}.training.keep_state was false; use another --run-dir "
                    "to train from the first step on"
                )
