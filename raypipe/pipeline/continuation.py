"""Continuation: which stored results a unit begins with, and which are out of date.

A stored result may be continued if it is a prefix of the new one: a fresh computation would begin
with the same steps. A unit says so by its budget, and by whether it is extensible. What depends on
it is computed again once it has gone on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypipe.errors import ConfigError
from raypipe.pipeline.experiment import Unit
from raypipe.provenance import now

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from raypipe.pipeline.context import StageContext
    from raypipe.pipeline.experiment import Stage
    from raypipe.storage.ledger import Ledger, Row
    from raypipe.storage.run_directory import RunDirectory

#: the ledger's table of the shared parts of identities, by their hash
IDENTITIES = "identities"
#: status of a unit that is not finished, whose parts are of its identity and needs
BEGUN = "begun"
#: status of a finished unit that is being continued to a larger budget
CONTINUED = "continued"


def records(context: StageContext, units: Iterable[Unit], status: str) -> dict[str, dict[str, Row]]:
    """Return the records of units in the ledger's tables, and of the identities that are new.

    Raises:
        ValueError: a unit without an identity.

    """
    tables: dict[str, dict[str, Row]] = {"units": {}}
    for unit in units:
        if unit.identity is None:
            raise ValueError(f"unit {unit.key}: its identity was not composed")
        row: Row = {
            **unit.identity.record(),
            "status": status,
            "budget": unit.budget,
            "extensible": unit.extensible,
            "stage": context.stage.name,
            "code": context.session.code,
            "finished_at": now(),
        }
        if unit.extents:
            row["extents"] = dict(unit.extents)
        tables["units"][unit.key] = row
        if context.ledger.get(IDENTITIES, row["shared"]) is None:
            tables.setdefault(IDENTITIES, {})[row["shared"]] = dict(unit.identity.shared)
    return tables


def begin_units(context: StageContext) -> None:
    """Record which unfinished units restart, and forget what they left before.

    These are the units whose needs can go on: if that happens before a unit is finished, its parts
    are out of date.
    """
    stage, outdated, begun = context.stage, [], []
    for unit in context.unfinished():
        stored = context.ledger.get("units", unit.key)
        if stored is not None and is_outdated(stored, unit):
            outdated.append(unit)
        if unit.extents and (stored is None or is_outdated(stored, unit)):
            begun.append(unit)
    if outdated and not stage.always_rerun:
        context.say("computed again: what it needs has gone on")
        if stage.forget is not None:
            stage.forget(context, outdated)
    if begun:
        context.ledger.put_tables(records(context, begun, BEGUN))


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
