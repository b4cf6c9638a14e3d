"""Continuation: what a run directory already holds of a configuration, and what it refuses.

Stored results are never altered. :func:`resume` decides that for everything that is stored; other
packages pass what belongs to them as data. A stored result may be continued if it is a prefix of
the new one: a fresh computation would begin with the same steps. A unit says so by its budget, and
by whether it is extensible. What depends on it is computed again once it has gone on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from raypipe.errors import ConfigError, named
from raypipe.graph.experiment import Units
from raypipe.graph.identity import differences
from raypipe.store.run_directory import variant_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from raypipe.graph.experiment import Stage, Unit
    from raypipe.graph.source import SourceCode
    from raypipe.store.ledger import Ledger, Row
    from raypipe.store.run_directory import RunDirectory

#: the ledger's table of the shared parts of identities, by their hash
IDENTITIES = "identities"
#: the ledger's table of entries about the whole run
ENTRIES = "runs"
#: status of a unit that is not finished, whose parts are of its identity and needs
BEGUN = "begun"
#: status of a finished unit that is being continued to a larger budget
CONTINUED = "continued"

#: changed modules that a message names
_MOST_NAMED = 5


class Resumed(NamedTuple):
    """The stages of a command that are known so far, compared with a run directory.

    ``is_stored`` says whether all results are stored, and ``warning`` that the code has changed
    since they were computed.
    """

    stages: Sequence[Stage]
    is_stored: bool
    warning: str


def is_outdated(stored: Row, unit: Unit) -> bool:
    """Whether a stored result is of another identity, or what it needs has gone on since."""
    same = stored["fingerprint"] == unit.fingerprint
    return not same or stored.get("extents", {}) != unit.extents


def _is_prefix(stored: Row, unit: Unit) -> bool:
    """Whether the unit begins with a stored result of its identity, which may be all of it."""
    if stored["extensible"]:
        return bool(stored["budget"] <= unit.budget)
    return bool(stored["budget"] == unit.budget)


def is_continued(stored: Row | None, unit: Unit) -> bool:
    """Whether a unit continues a finished one."""
    if stored is None or stored["status"] == BEGUN:
        return False
    return not is_outdated(stored, unit) and _is_prefix(stored, unit)


def is_done(ledger: Ledger, unit: Unit) -> bool:
    """Whether a unit's result is stored, for its whole budget, and not out of date."""
    return _is_whole(ledger.get("units", unit.key), unit)


def _is_whole(stored: Row | None, unit: Unit) -> bool:
    if stored is None or stored["status"] != "succeeded" or is_outdated(stored, unit):
        return False
    return bool(stored["budget"] >= unit.budget)


def unfinished(stage: Stage, ledger: Ledger) -> Sequence[Unit]:
    """Return the units of a stage that are not finished, in order."""
    if not isinstance(stage.units, Units):
        return [unit for unit in stage.units if not is_done(ledger, unit)]
    if not ledger.count("units"):  # the most common case, and the longest
        return stage.units
    return stage.units.where(lambda unit: not is_done(ledger, unit))


def all_stored(stages: Iterable[Stage], ledger: Ledger) -> bool:
    """Whether every unit of these stages is finished."""
    return all(is_done(stage.seen(ledger), unit) for stage in stages for unit in stage.units)


def resume(
    run_dir: RunDirectory,
    ledger: Ledger,
    entries: Mapping[str, Row],
    known: Callable[[Ledger], tuple[Sequence[Stage], bool]],
    source: SourceCode | None = None,
) -> Resumed:
    """Return what is asked of a run directory, if that alters nothing that is stored.

    Args:
        run_dir: the run directory.
        ledger: its ledger.
        entries: entries about the whole run that decide stored results, such as the varied keys.
            Those of the ledger must have the same values.
        known: returns the stages that the ledger's rows lead to, and whether they are all.
        source: the experiment's source code, to compare with that which computed stored results.

    Raises:
        ConfigError: what differs, with the stored and the new value.

    """
    where = f"--run-dir {run_dir.shown}"
    _refuse_changed_entries(where, ledger, entries)
    stages, is_whole = known(ledger)
    if not ledger.count("units"):
        return Resumed(stages, is_whole and all_stored(stages, ledger), "")
    used, fixed = set[str](), set[str]()  # code that computed results, and whose results need it
    for stage in stages:
        is_stored, codes = _checked(where, run_dir, ledger, stage)
        is_whole = is_whole and is_stored
        used |= codes
        fixed |= codes if stage.strict_code else set()
    return Resumed(stages, is_whole, _of_code(where, ledger, source, used, fixed))


def _checked(
    where: str, run_dir: RunDirectory, ledger: Ledger, stage: Stage
) -> tuple[bool, set[str]]:
    """Return whether all units of a stage are stored, and the code that computed those that are.

    Raises:
        ConfigError: a stored unit would be altered.

    """
    seen, is_whole, codes = stage.seen(ledger), True, set[str]()
    for unit in stage.units:  # once, since there may be a million
        stored = seen.get("units", unit.key)
        is_stored = _is_whole(stored, unit)
        is_whole = is_whole and is_stored
        if stored is None or stage.always_rerun:
            continue
        codes.add(stored["code"])
        if stored["status"] == BEGUN:
            continue
        if not (is_stored and stored["budget"] == unit.budget):
            _refuse_changed_unit(where, ledger, stage, unit, stored)
        if stage.training is not None:
            _refuse_lost_state(where, run_dir, stage, unit, stored)
        if stage.verify is not None:
            try:
                stage.verify(seen, unit)
            except ValueError as error:
                raise ConfigError(f"{where}: {unit.key}: {error}") from None
    return is_whole, codes


def _refuse_changed_entries(where: str, ledger: Ledger, entries: Mapping[str, Row]) -> None:
    for name, asked in entries.items():
        stored = ledger.get(ENTRIES, name) or asked
        changes = differences({key: stored.get(key) for key in asked}, asked)
        _refuse(where, "the run", {f"{name}.{key}": values for key, values in changes.items()})


def _refuse_changed_unit(where: str, ledger: Ledger, stage: Stage, unit: Unit, stored: Row) -> None:
    changes: dict[str, tuple[Any, Any]] = {}
    if stored["fingerprint"] != unit.fingerprint:
        shared = ledger.get(IDENTITIES, stored["shared"]) or {}
        changes |= unit.composed.differences(stored, shared)
    note, budget = "", stored["budget"]
    if not _is_prefix(stored, unit):
        if stage.training and budget < unit.budget and not changes:
            note = f"\n  it cannot go on: {stage.training.settings.fixed_by(budget)}"
        changes[unit.budget_key] = budget, unit.budget
    _refuse(where, variant_name(unit.key, stage.variant), changes, note)


def _refuse(where: str, what: str, changes: Mapping[str, tuple[Any, Any]], note: str = "") -> None:
    if "matrix.keys" in changes:
        note = "\n  give a key that no longer varies as a list of one value"
    if changes:
        lines = [f"\n  {key}: stored {old!r}, now {new!r}" for key, (old, new) in changes.items()]
        raise ConfigError(
            f"{where}: {what} is stored with other settings, and stored results are never "
            f"altered; use another --run-dir, or revert:{''.join(lines)}{note}"
        )


def _refuse_lost_state(
    where: str, run_dir: RunDirectory, stage: Stage, unit: Unit, stored: Row
) -> None:
    """Refuse to continue a finished training whose last state is not stored."""
    is_ended = stored["status"] != CONTINUED and stored["budget"] == unit.budget
    if is_ended or not is_continued(stored, unit):
        return
    files = stage.files(run_dir)
    names = files.list(files.checkpoints(unit.key))
    if not any(name.startswith("step_") for name in names):
        raise ConfigError(
            f"{where}: {stage.key} cannot be continued from {stored['budget']} to {unit.budget} "
            f"({unit.budget_key}): its last checkpoint is not stored. It is missing if "
            f"{stage.name}.training.keep_state was false; use another --run-dir to train from the "
            "first step on"
        )


def _of_code(
    where: str, ledger: Ledger, source: SourceCode | None, used: set[str], fixed: set[str]
) -> str:
    """Return the warning that modules were edited since results were stored; empty if none were.

    Raises:
        ConfigError: results are ``fixed`` to the code of before.

    """
    if source is None:
        return ""
    rows = ((code, ledger.get("code", code)) for code in used)
    edited = {code: source.changes(row["modules"]) for code, row in rows if row is not None}
    if not any(edited.values()):
        return ""
    names = named(sorted({name for changed in edited.values() for name in changed}), _MOST_NAMED)
    message = f"the code changed since results were stored: {names}"
    if any(edited.get(code) for code in fixed):
        raise ConfigError(
            f"{where}: {message}; use another --run-dir to compute everything with this code, or "
            "add version=1 to keep what is stored and compute the rest"
        )
    return (
        f"WARNING: {message}; stored results are kept (if they would differ, use another "
        "--run-dir, and raise `version` in the experiment)"
    )
