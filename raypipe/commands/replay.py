"""``raypipe replay``: compute stored units again, and compare their rows with the stored ones.

A stage runs by itself, in this process and in a scratch run directory, with the rows and files of
the stages before it but nothing that it wrote itself. Caches and trackers are not used.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pyarrow import fs as arrow_fs

from raypipe import hardware
from raypipe.commands import cluster
from raypipe.commands.configuration import (
    declared,
    refuse_code_inside,
    resolve,
    stored_document,
)
from raypipe.commands.plan import Work, work_of
from raypipe.commands.results import opened
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.graph.context import Session
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.progress import Display
from raypipe.graph.runner import GraphRunner
from raypipe.graph.stored_results import is_done
from raypipe.graph.tracking import Trackers
from raypipe.graph.training_stage import HARDWARE
from raypipe.provenance import environment_row
from raypipe.redaction import printable
from raypipe.store.ledger import INTERNAL, Ledger, Row, writes
from raypipe.store.run_directory import BASE, RunDirectory, variant_name
from raypipe.store.tables import ADDED, Table
from raypipe.study.sweep_settings import SWEEP
from raypipe.training.tables import SETTINGS, TRIALS

_UNITS, _REPLAY, _CACHE = "units", "replay", "RAYPIPE_CACHE"
#: units that are computed by default, and the relative difference that counts as equal
_SAMPLE, _TOLERANCE = 3, 1e-5
#: tables that are not part of the result of a stage
_NOT_RESULTS = INTERNAL | {"failures", "stages", "environment"}
#: columns of the environment in which the same machine differs a little
_INEXACT = ("memory_bytes", "gpu_memory_bytes")
#: columns of time, memory, energy, speed and use, and of a place, by their names and their units
_MEASURED = re.compile(r".*(_s|_bytes|_w|_j|_j_per_\w+)|worker|hostname|host|node|pid")
_MEASURED_IN = ("s", "B", "W", "J", "%", "1/s")
#: columns that say how a row was computed, where they are declared
_WAYS = re.compile(
    "attempts?|cached|device|workers|strategy|mfu|micro_batch|accumulation|loader_wait_share"
)
#: columns of trainings that the configuration gives: equal values say nothing about the results
_GIVEN = re.compile("|".join(("trial_id|stage|status|param_.*", *(c.name for c in SETTINGS))))

Outcome = Literal[
    "equal", "within the tolerance", "differs", "failed", "changed", "nothing to compare"
]
_SAME: tuple[Outcome, ...] = ("equal", "within the tolerance")
_CHANGED = (
    "its settings, data or version are not what they were; `raypipe plan --run-dir` names them"
)


#: a row by its table and key: as it is stored, and as it was computed again
Pair = tuple[str, str, Row | None, Row | None]


@dataclass(frozen=True)
class Replayed:
    """A unit, or a table that units share: how it compares with what is stored.

    ``changed`` is a unit that was not computed: something else decides its result now. ``reason``
    names what that is, the columns that differ, or why a unit failed.
    """

    unit: str
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        """Return it in a line."""
        return f"{self.unit}: {self.outcome}{': ' * bool(self.reason)}{self.reason}"


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay.

    Attributes:
        run_dir: the run directory.
        stored: the number of its stored units.
        units: those that were computed again.
        changes: what changed since they were stored: code, libraries, hardware.
        choice: which units were left out, in words.

    """

    run_dir: str
    stored: int
    units: tuple[Replayed, ...]
    changes: tuple[str, ...]
    choice: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether results were compared, and all are equal or within the tolerance."""
        outcomes = {each.outcome for each in self.units} - {"nothing to compare"}
        return bool(outcomes) and outcomes <= {*_SAME}

    def __str__(self) -> str:
        """Return the lines for a reader."""
        outcomes = [each.outcome for each in self.units]
        lines = [f"replay of {self.run_dir}: {self.stored} stored units{self.choice}"]
        lines += map(str, self.units)
        nothing = ("nothing that is recorded; does a seed decide all that is random?",)
        changes = self.changes or (nothing if "differs" in outcomes else ())
        lines += [f"changed since: {each}" for each in changes]
        counts = (f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
        return printable("\n".join([*lines, ", ".join(counts)]), keep="\n")


def replay(location: str, units: Sequence[str]) -> Replay:
    """Compute stored units again and compare them with what is stored.

    Args:
        location: the run directory, which is only read.
        units: names of units, or what such names begin with; a sample if empty.

    Raises:
        ConfigError: a mistake, or nothing that can be computed again.

    """
    run = opened(location)
    ledger = Ledger.to_read(run)
    work = _work(run)
    stored = {key for key, row in ledger.items(_UNITS) if row.get("status") == "succeeded"}
    stages, _ = work.graph.known(ledger)
    found = dict[str, tuple[Stage, Unit]]()
    for stage in stages:
        # a sweep measures speed
        if stage.name != SWEEP and (units or not (stage.name == HARDWARE or stage.always_rerun)):
            keys = ((variant_name(unit.key, stage.variant), unit) for unit in stage.units)
            found |= {key: (stage, unit) for key, unit in keys if key in stored}
    names = _chosen(run, list(found), units)
    done = {name for name in names if is_done(found[name][0].seen(ledger), found[name][1])}
    rows = [Replayed(name, "changed", _CHANGED) for name in names if name not in done]
    names = [name for name in names if name in done]
    choice = ""
    if not units and len(names) > _SAMPLE:  # evenly spaced
        names = [names[n * (len(names) - 1) // (_SAMPLE - 1)] for n in range(_SAMPLE)]
        choice = f", a sample of {_SAMPLE} (name units or stages for others)"
    groups: dict[str, list[Unit]] = {}
    for stage, unit in map(found.__getitem__, names):
        groups.setdefault(stage.key, []).append(unit)
    keyed = {stage.key: stage for stage in stages}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="raypipe-replay-")))
        # else values of other runs would be taken
        stack.callback(_set_cache, os.environ.get(_CACHE))
        _set_cache(str(folder / "cache"))
        for number, (key, group) in enumerate(groups.items()):
            stage, scratch = keyed[key], RunDirectory.at(folder / str(number))
            _copy_files(run, stage, keyed, scratch)
            stage = replace(stage, units=group, needs=())
            rows += _computed(ledger, work, stage, scratch)
    changes = tuple(_changes(ledger, work, names))
    return Replay(run.shown, len(stored), tuple(rows), changes, choice)


def _work(run: RunDirectory) -> Work:
    """Return the work of a run's newest configuration. Raises ConfigError."""
    document, nodes = stored_document(run), [hardware.detect()]
    if document.function.startswith("__main__:"):
        raise ConfigError(
            f"{run.shown}: {document.function.partition(':')[2]} was a function of a notebook or a "
            "script, which this process does not have; only functions of modules can be replayed"
        )
    refuse_code_inside(run, document.experiment or document.function.partition(":")[0])
    work = work_of(resolve(document, (), "auto", nodes), (), nodes)
    work.check(may_grow=True)
    return work


def _chosen(run: RunDirectory, known: Sequence[str], units: Sequence[str]) -> list[str]:
    """Return the names that begin with one of the units; all without any. Raises ConfigError."""

    def matching(unit: str) -> list[str]:
        return [name for name in known if name == unit or name.startswith((f"{unit}/", f"{unit}@"))]

    for unit in units:
        if not matching(unit):
            near = did_you_mean(unit, known)
            raise ConfigError(f"{run.shown}: has no result of {unit!r} to compute again{near}")
    if not known:
        raise ConfigError(
            f"{run.shown}: has no result that can be computed again; trials of a sweep are not, "
            "since they measure speed"
        )
    return list(dict.fromkeys(name for unit in units for name in matching(unit))) or list(known)


def _compared(name: str, pairs: Iterable[Pair], tables: Mapping[str, Table]) -> Replayed:
    """Compare the rows of a unit, column by column.

    Columns that measure or name a place, by the declarations of their tables, are left out.
    Differences are relative: infinite where a value is not a number, or a whole row is missing.
    """
    differing: dict[str, list[tuple[float, Any, Any]]] = {}
    has_results = False
    for table, key, old, new in pairs:
        if old is None or new is None:
            old, new = ({"whole row": each and key} for each in (old, new))
        for column in {**old, **new}:
            values = old.get(column), new.get(column)
            if column in ADDED or _is_measured(tables.get(table), column):
                continue
            is_given = table == TRIALS.name and _GIVEN.fullmatch(column)
            has_results |= values != (None, None) and not is_given
            if by := _distance(*values):
                differing.setdefault(f"{table}.{column}", []).append((by, *values))
    if not differing:
        return Replayed(name, "equal" if has_results else "nothing to compare")
    texts = list[str]()
    for column, rows in differing.items():
        largest, (_, stored, now) = max(by for by, *_ in rows), rows[0]
        by_up_to = f" by up to {largest:.2g}" if math.isfinite(largest) else ""
        many = f" in {len(rows)} rows" if len(rows) > 1 else ""
        texts.append(f"{column}{by_up_to}{many} (stored {stored!r}, now {now!r})")
    near = all(by <= _TOLERANCE for rows in differing.values() for by, *_ in rows)
    return Replayed(name, "within the tolerance" if near else "differs", "; ".join(texts))


def _is_measured(table: Table | None, column: str) -> bool:
    """Whether a column measures time, memory or speed, or says where a row was computed."""
    declared = [c for c in (table.columns if table is not None else ()) if c.name == column]
    return bool(_MEASURED.fullmatch(column)) or any(
        c.type == "time" or c.unit in _MEASURED_IN or _WAYS.fullmatch(column) for c in declared
    )


def _distance(stored: Any, now: Any) -> float:
    """Return the relative difference of two values: 0 if equal, infinite if not numbers."""
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        return max(map(_distance, stored, now), default=0.0)
    if stored == now:
        return 0.0
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in (stored, now)):
        return math.inf
    if math.isfinite(stored) and math.isfinite(now):
        return float(abs(stored - now) / max(abs(stored), abs(now)))
    return 0.0 if math.isnan(stored) and math.isnan(now) else math.inf


def _changes(ledger: Ledger, work: Work, units: Sequence[str]) -> list[str]:
    """Return what changed since the units were stored: code, libraries, hardware."""
    changed: dict[str, None] = {}
    code = work.configuration.source()
    for version in {str((ledger.get(_UNITS, unit) or {}).get("code")) for unit in units}:
        if (row := ledger.get("code", version)) is not None:
            changed |= dict.fromkeys(f"code: {name}" for name in code.changes(row["modules"]))
    rows = ledger.rows("environment")
    for key, value in environment_row().items() if rows else ():
        earlier = dict.fromkeys(row.get(key) for row in rows)
        if value not in earlier and key not in _INEXACT:
            changed[f"{key}: {', '.join(map(str, earlier))} -> {value}"] = None
    return list(changed)


def _computed(
    ledger: Ledger,
    work: Work,
    stage: Stage,
    scratch: RunDirectory,
) -> Iterator[Replayed]:
    """Compute the units of a stage again, and compare their rows.

    Rows that are of no unit, such as a summary of several, are compared apart.
    """
    stages = {name: row["stage"] for name, row in ledger.items(_UNITS)}  # by unit
    visible = {stage.variant, *stage.variants.values()}
    before: dict[str, dict[str, Row]] = {}  # what the stage may see, without what it wrote
    owners: dict[tuple[str, str], str] = {}  # of what it wrote, by table and key
    for table in {*ledger.tables()} - _NOT_RESULTS | {"environment"}:
        is_written = writes(ledger, stage.key, table)
        for key, row in ledger.items(table):
            variant, unit = row.get("variant", BASE), _owner(key, row, stages)
            if (
                is_written
                and variant == stage.variant
                and stages.get(unit, stage.name) == stage.name
            ):
                owners[table, key] = unit
            elif variant in visible:
                before.setdefault(table, {})[key] = row
    fresh = Ledger(scratch, stamp={"command_id": _REPLAY})
    fresh.put_tables(before)
    failure = _run_alone(work, stage, scratch, fresh)
    now = {
        (table, key): row
        for table in {*fresh.tables()} - _NOT_RESULTS
        for key, row in fresh.items(table)
        if row.get("command_id") == _REPLAY
    }
    owners |= {place: _owner(place[1], row, stages) for place, row in now.items()}
    units = {variant_name(unit.key, stage.variant): unit.key for unit in stage.units}
    pairs: dict[str, list[Pair]] = {name: [] for name in units}
    only = next(iter(units)) if len(units) == 1 else ""
    for place, owner in owners.items():
        if owner in units or place in now:
            name = owner if owner in units else only or f"{place[0]} of {stage.key}"
            pairs.setdefault(name, []).append((*place, ledger.get(*place), now.get(place)))
    done = {unit for unit, row in fresh.items(_UNITS) if row["status"] == "succeeded"}
    tables = declared(work.configuration.experiment)
    for name, of_unit in pairs.items():
        if name in units and name not in done:
            yield Replayed(name, "failed", failure)
            continue
        yield _compared(name, of_unit, tables)


def _owner(key: str, row: Row, units: Container[str]) -> str:
    """Return the unit whose result a row is, by its key or its stage; empty if none is named."""
    variant = str(row.get("variant", BASE))
    while variant != BASE and key.endswith(f"@{variant}"):
        key = key.removesuffix(f"@{variant}")
    parts = key.split("/")
    named = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    names = (variant_name(str(each), variant) for each in (*named, row.get("stage")))
    return next((name for name in names if name in units), "")


def _run_alone(work: Work, stage: Stage, scratch: RunDirectory, ledger: Ledger) -> str:
    """Run a stage in this process; return why it failed, if a unit did."""
    experiment, settings = work.configuration.experiment, work.configuration.settings
    tables, trackers = declared(experiment), Trackers((), scratch, _REPLAY, experiment.name, {})
    with ExitStack() as stack:
        launcher = cluster.local(stack)
        stack.enter_context(redirect_stdout(sys.stderr))
        display = stack.enter_context(Display(live=False))
        session = Session(
            scratch, _REPLAY, ledger, launcher, display, work.nodes, trackers, settings, tables
        )
        return GraphRunner(session).run([stage]) or "did not finish"


def _copy_files(
    run: RunDirectory, stage: Stage, stages: Mapping[str, Stage], scratch: RunDirectory
) -> None:
    """Copy what the stages before a stage left for it: artifacts and weights."""
    needed = [*stage.needed_keys]
    for key in needed:  # which grows: they need others
        needed += stages[key].needed_keys
    for before in map(stages.__getitem__, dict.fromkeys(needed)):
        files = before.files(run)
        infos = files.infos(files.artifact(before.name), recursive=True)
        paths = [info.path for info in infos if info.type == arrow_fs.FileType.File]
        paths += filter(files.exists, (files.model(unit.key) for unit in before.units))
        for path in paths:
            copy = scratch.path(path.removeprefix(f"{run.path()}/"))
            scratch.write(copy, run.read(path), durable=False)


def _set_cache(value: str | None) -> None:
    """Set the folder of the user's cache, or have the default one."""
    os.environ.pop(_CACHE, None)
    if value is not None:
        os.environ[_CACHE] = value
