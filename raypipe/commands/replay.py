"""``raypipe replay``: compute stored units again, and compare their rows with the stored ones.

A stage runs by itself, in this process and in a scratch run directory, with the rows and files of
the stages before it but nothing that it wrote itself. Caches and trackers are not used.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, redirect_stdout
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pyarrow import fs as arrow_fs

from raypipe import import_path
from raypipe.commands import cluster
from raypipe.commands.configuration import (
    declared,
    refuse_code_inside,
    resolve,
    stored_document,
)
from raypipe.commands.plan import work_of
from raypipe.commands.run import CONFIGURATION
from raypipe.commands.summary import opened
from raypipe.config.document import parse
from raypipe.config.levels import did_you_mean
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.context import Session
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.progress import Display
from raypipe.graph.runner import run_stages
from raypipe.graph.source import code_of, edits, kept_code
from raypipe.graph.stored_results import IDENTITIES, is_done
from raypipe.graph.training_stage import HARDWARE
from raypipe.provenance import environment_row
from raypipe.redaction import printable, without_secrets
from raypipe.store.ledger import INTERNAL, Ledger, Row, writes
from raypipe.store.run_directory import BASE, RunDirectory, variant_name
from raypipe.store.tables import ADDED, Table, read_rows
from raypipe.study.sweep_settings import SWEEP
from raypipe.tracking import Trackers
from raypipe.training.tables import SETTINGS, TRIALS

_UNITS, _STEPS, _REPLAY, _CACHE = "units", "steps", "replay", "RAYPIPE_CACHE"
_MOST_LINES, _MOST_NAMED = 30, 8
#: units that are computed by default
_SAMPLE = 3
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
        not_compared: columns that measure time, memory or speed, or name a place.
        choice: which units were left out, in words.

    """

    run_dir: str
    stored: int
    units: tuple[Replayed, ...]
    changes: tuple[str, ...]
    not_compared: tuple[str, ...]
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
        first = sorted(self.units, key=lambda each: each.outcome in _SAME)[:_MOST_LINES]
        lines += [str(each) for each in self.units if each in first]
        if len(first) < len(self.units):
            lines.append(f"and {len(self.units) - len(first)} more")
        if self.not_compared:
            lines.append(f"not compared: {', '.join(self.not_compared)}")
        nothing = ("nothing that is recorded; does a seed decide all that is random?",)
        changes = self.changes or (nothing if "differs" in outcomes else ())
        lines += [f"changed since: {each}" for each in changes]
        counts = (f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
        return printable("\n".join([*lines, ", ".join(counts)]), keep="\n")


@dataclass(frozen=True)
class _Stored:
    """A stored unit, and what computes it: a stage of a configuration, among its stages by key."""

    configuration: Configuration
    stages: Mapping[str, Stage]
    stage: Stage
    unit: Unit

    @property
    def name(self) -> str:
        return variant_name(self.unit.key, self.stage.variant)

    def difference(self, ledger: Ledger) -> str | None:
        """Return what decides the result and is not as it was; None if it can be computed.

        An edited script is not, as it is code.
        """
        seen = self.stage.seen(ledger)
        if is_done(seen, self.unit):
            return None
        stored = seen.get(_UNITS, self.unit.key) or {}
        shared = ledger.get(IDENTITIES, str(stored.get("shared"))) or {}
        differing: dict[str, Any] = {}
        if self.unit.identity is not None and stored.get("fingerprint") != self.unit.fingerprint:
            differing = without_secrets(self.unit.identity.differences(stored, shared))
        scripts = (ledger.get("code", str(stored.get("code"))) or {}).get("scripts", ())
        if differing and differing.keys() <= {f"files.{name}" for name in scripts}:
            return None
        texts = [f"{key}: stored {old!r}, now {new!r}" for key, (old, new) in differing.items()]
        return f"cannot be computed as it was: {'; '.join(texts) or 'what it needs has gone on'}"


def replay(
    location: str, units: Sequence[str], tolerance: float, *, every: bool, kept_code: bool
) -> Replay:
    """Compute stored units again and compare them with what is stored.

    Args:
        location: the run directory, which is only read.
        units: names of units, or what such names begin with; a sample if empty.
        tolerance: the relative difference up to which numbers count as equal.
        every: all units instead of a sample.
        kept_code: whether to run the code that the run directory keeps.

    Raises:
        ConfigError: a mistake, or nothing that can be computed again.

    """
    run = opened(location)
    ledger = Ledger.to_read(run)
    stored = {key: row for key, row in ledger.items(_UNITS) if row.get("status") == "succeeded"}
    names = _names(run, ledger, stored, units)
    left_out = set[str]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="raypipe-replay-")))
        if kept_code:
            names = _use_kept_code(run, ledger, names, folder / "code", stack)
        found, rows = _find(run, ledger, names, named=bool(units))
        if not found and not rows:
            raise ConfigError(f"{run.shown}: has no stored unit that can be computed again")
        chosen = found
        if not (units or every) and len(found) > _SAMPLE:  # evenly spaced
            chosen = [found[n * (len(found) - 1) // (_SAMPLE - 1)] for n in range(_SAMPLE)]
        changes = _changes(run, ledger, chosen)
        if kept_code and any(each.startswith("code") for each in changes):
            raise ConfigError(
                f"{run.shown}: its kept code is not complete: secrets were left out, or files that "
                "are too large (raypipe show --code); replay with the current code"
            )
        groups: dict[tuple[int, str], list[_Stored]] = {}
        for each in chosen:
            groups.setdefault((id(each.configuration), each.stage.key), []).append(each)
        # else values of other runs would be taken
        stack.callback(_set_cache, os.environ.get(_CACHE))
        _set_cache(str(folder / "cache"))
        for number, group in enumerate(groups.values()):
            scratch = RunDirectory.at(folder / str(number))
            rows += _computed(run, ledger, group, scratch, tolerance, left_out)
    choice = ""
    if swept := sum(row.get("stage") == SWEEP for row in stored.values()):
        choice += f", {swept} of a sweep left out"
    if len(found) > len(chosen):
        choice += f", a sample of {len(chosen)} (choose with --all or names)"
    not_compared = tuple(sorted(left_out))
    return Replay(run.shown, len(stored), tuple(rows), tuple(changes), not_compared, choice)


def _compared(
    name: str,
    pairs: Iterable[Pair],
    tables: Mapping[str, Table],
    tolerance: float,
    left_out: set[str],
) -> Replayed:
    """Compare the rows of a unit, column by column.

    Columns that measure or name a place, by the declarations of their tables, are added to
    ``left_out`` instead. Differences are relative: infinite where a value is not a number, or a
    whole row is missing.
    """
    differing: dict[str, list[tuple[float, Any, Any]]] = {}
    has_results = False
    for table, key, old, new in pairs:
        if old is None or new is None:
            old, new = ({"whole row": each and key} for each in (old, new))
        for column in {**old, **new}:
            values = old.get(column), new.get(column)
            if column in ADDED:
                continue
            if _is_measured(tables.get(table), column):
                left_out.add(f"{table}.{column}")
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
    if len(texts) > _MOST_NAMED:
        texts[_MOST_NAMED:] = [f"{len(texts) - _MOST_NAMED} more columns"]
    near = all(by <= tolerance for rows in differing.values() for by, *_ in rows)
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


def _names(
    run: RunDirectory, ledger: Ledger, stored: Mapping[str, Row], units: Sequence[str]
) -> list[str]:
    """Return the names of the stored units, or of those that are named. Raises ConfigError."""

    def matching(keys: Iterable[str], names: Sequence[str]) -> list[str]:
        begins = tuple(f"{name}{end}" for name in names for end in "/@")
        return [key for key in keys if key in names or key.startswith(begins)]

    failures = {
        variant_name(str(row["unit"]), str(row.get("variant", BASE))): row
        for row in ledger.rows("failures")
    }
    for name in units:
        failed = [] if matching(stored, [name]) else matching(failures, [name])
        for unit in failed:
            why = f"{failures[unit]['kind']}: {failures[unit]['message']}"
            raise ConfigError(
                f"{run.shown}: {unit}: has no result to compare, since it failed ({why}); "
                "`raypipe run` computes it"
            )
        if not matching(stored, [name]):
            near = did_you_mean(name, list(stored))
            raise ConfigError(f"{run.shown}: has no stored unit {name!r}{near}")
    chosen = matching(stored, units) if units else list(stored)
    names = [name for name in chosen if stored[name].get("stage") != SWEEP]
    if len(names) < len(chosen) and (units or not names):
        raise ConfigError(
            f"{run.shown}: the trials of a sweep are not replayed, since they measure speed; train "
            "a stage with the settings of a trial to replay that"
        )
    return names


def _find(
    run: RunDirectory, ledger: Ledger, names: Sequence[str], *, named: bool
) -> tuple[list[_Stored], list[Replayed]]:
    """Return the stored units that a configuration of the run asks for.

    Those whose result is decided by something else now are returned apart, each with the reason. If
    not named, the check of the hardware and stages that only summarize are left out.
    """
    found, changed = dict[str, _Stored](), dict[str, Replayed]()
    nodes, wanted = cluster.hardware_of(None), set(names)
    newest = stored_document(run)
    if newest.function.startswith("__main__:"):
        raise ConfigError(
            f"{run.shown}: {newest.function.partition(':')[2]} was a function of a notebook or a "
            "script, which this process does not have; only functions of modules can be replayed"
        )
    earlier = [row["text"] for k, row in ledger.items("runs") if k.startswith(CONFIGURATION)]
    origin = f"{run.shown}: an earlier configuration"
    for document in chain([newest], (parse(text, origin) for text in reversed(earlier))):
        if found.keys() >= wanted:
            break
        try:
            refuse_code_inside(run, document.experiment or document.function.partition(":")[0])
            work = work_of(resolve(document, (), "auto", nodes), (), nodes)
            work.check_training()
        except ConfigError:
            if document is newest:
                raise
            continue  # an earlier configuration, of data that are gone, say
        stages, _ = work.graph.known(ledger)
        keyed = {stage.key: stage for stage in stages}
        shown = [s for s in stages if named or not (s.name == HARDWARE or s.always_rerun)]
        for one in (_Stored(work.configuration, keyed, s, unit) for s in shown for unit in s.units):
            if one.name in wanted and one.name not in found:
                if (reason := one.difference(ledger)) is None:
                    found[one.name] = one
                else:
                    changed.setdefault(one.name, Replayed(one.name, "changed", reason))
    return [*found.values()], [each for name, each in changed.items() if name not in found]


def _use_kept_code(
    run: RunDirectory, ledger: Ledger, names: Sequence[str], folder: Path, stack: ExitStack
) -> list[str]:
    """Work with the kept code of the newest unit, until the stack closes; return its units.

    Its files lie in a folder that has links to everything else in the current directory, which it
    becomes: functions and scripts find their data.
    """
    rows = {name: ledger.get(_UNITS, name) or {} for name in names}
    newest = max(rows.values(), key=lambda row: str(row.get("finished_at")), default={})
    version = str(newest.get("code"))
    files, here = kept_code(run, version), Path.cwd()
    if not files:
        raise ConfigError(f"{run.shown}: does not keep the code of its units; replay without it")
    place = folder / (here.name or "code")
    for name, text in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    places = {path for name in files for path in (place / name).parents if folder in path.parents}
    for path in (folder, *places):
        origin = here.parent / path.relative_to(folder)
        readable = origin.is_dir() and os.access(origin, os.R_OK)
        for each in origin.iterdir() if readable else ():
            if not (path / each.name).exists() and each.name != "__pycache__":
                (path / each.name).symlink_to(each)
        init = path / "__init__.py"
        if path not in (folder, place) and not init.exists():
            init.touch()  # else another package of its name is used
    modules = (ledger.get("code", version) or {}).get("modules", ())
    own = [each.split(".") for each in modules if not each.startswith("raypipe.")]

    def forget() -> None:
        for parts in own:
            for length in range(1, len(parts) + 1):  # a loaded package has its own path
                sys.modules.pop(".".join(parts[:length]), None)

    stack.callback(forget)
    stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
    stack.enter_context(chdir(place))
    import_path.prefer()
    forget()
    return [name for name, row in rows.items() if row.get("code") == version]


def _changes(run: RunDirectory, ledger: Ledger, chosen: Sequence[_Stored]) -> list[str]:
    """Return what changed since the units were stored: code, libraries, hardware."""
    found: dict[str, None] = {}
    ran = {(ledger.get(_UNITS, each.name) or {}).get("code"): each for each in chosen}
    for version, one in ran.items():
        if not version:
            continue
        kept, row = kept_code(run, version), ledger.get("code", version) or {}
        source = one.configuration.source()
        code = code_of(source, list(one.stages.values()))
        own = code_of(source, [one.stage]).files  # another stage may have added its own
        files = {name: text for name, text in code.files.items() if name in kept or name in own}
        texts = (edits(kept, files) if kept else []) or code.changes(row)
        found |= dict.fromkeys(f"code: {text}" for text in texts)
    rows = ledger.rows("environment")
    for key, value in environment_row().items() if rows else ():
        earlier = dict.fromkeys(row.get(key) for row in rows)
        if value not in earlier and key not in _INEXACT:
            found[f"{key}: {', '.join(map(str, earlier))} -> {value}"] = None
    return list(found)


def _computed(
    run: RunDirectory,
    ledger: Ledger,
    group: Sequence[_Stored],
    scratch: RunDirectory,
    tolerance: float,
    left_out: set[str],
) -> Iterator[Replayed]:
    """Compute units of a stage again, and compare their rows.

    Rows that several units share are compared apart.
    """
    one, units = group[0], [each.name for each in group]
    stage = replace(one.stage, units=[each.unit for each in group], needs=())
    visible = {stage.variant, *stage.variants.values()}
    stages = {name: row["stage"] for name, row in ledger.items(_UNITS)}  # by unit

    def owner(key: str, row: Row) -> str:
        """Return the unit whose result a row is, by its key or a column; empty if none is named."""
        variant = str(row.get("variant", BASE))
        while key.endswith(f"@{variant}"):
            key = key.removesuffix(f"@{variant}")
        parts = key.split("/")
        named = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
        candidates = filter(None, (*named, row.get("unit"), row.get("stage")))
        names = (variant_name(str(each), variant) for each in candidates)
        return next((name for name in names if name in stages), "")

    before: dict[str, dict[str, Row]] = {}  # what the stage may see, without its own rows
    places: dict[tuple[str, str], Row] = {}
    for table in sorted({*ledger.tables()} - _NOT_RESULTS | {"environment"}):
        is_written = writes(ledger, stage.key, table)
        for key, row in ledger.items(table):
            variant = row.get("variant", BASE)
            own = is_written and variant == stage.variant
            if own and stages.get(owner(key, row), stage.name) == stage.name:
                places[table, key] = row
            elif variant in visible:
                before.setdefault(table, {})[key] = row
    fresh = Ledger(scratch, stamp={"command_id": _REPLAY})
    fresh.put_tables(before)
    _copy_files(run, one, scratch)
    experiment, settings = one.configuration.experiment, one.configuration.settings
    tables, trackers = declared(experiment), Trackers((), scratch, _REPLAY, experiment.name, {})
    launcher, nodes = cluster.local(), cluster.hardware_of(None)
    with redirect_stdout(sys.stderr), Display(live=False) as display:
        session = Session(
            scratch, _REPLAY, fresh, launcher, display, nodes, trackers, settings, tables
        )
        failure = run_stages([stage], session) or "did not finish"
    now = {
        (table, key): row
        for table in {*fresh.tables()} - _NOT_RESULTS
        for key, row in fresh.items(table)
        if row.get("command_id") == _REPLAY
    }
    pairs: dict[str, list[Pair]] = {name: [] for name in units}
    for place, row in {**places, **now}.items():
        unit = owner(place[1], row)
        if unit not in pairs:
            if place not in now:
                continue
            table = variant_name(place[0], stage.variant)
            shared = f"{table}, rows of several units of {stage.name}"
            unit = units[0] if len(units) == 1 else shared
        pairs.setdefault(unit, []).append((*place, ledger.get(*place), now.get(place)))
    for each in group if stage.training is not None else ():
        trial = stage.files(run).trial_id(each.unit.key)
        old, new = (
            {str(row["step"]): row for row in read_rows(files, _STEPS, trial)}
            for files in map(stage.files, (run, scratch))
        )
        pairs[each.name] += [(_STEPS, s, old.get(s), new.get(s)) for s in {**old, **new}]
    failed = {*units} - {unit for unit, row in fresh.items(_UNITS) if row["status"] == "succeeded"}
    for unit, of_unit in pairs.items():
        if unit in failed:
            yield Replayed(unit, "failed", failure)
        else:
            yield _compared(unit, of_unit, tables, tolerance, left_out)


def _copy_files(run: RunDirectory, one: _Stored, scratch: RunDirectory) -> None:
    """Copy what the stages before a unit's left for it: artifacts, weights, logged steps."""
    needed = [*one.stage.needed_keys]
    for key in needed:  # which grows: they need others
        needed += one.stages[key].needed_keys
    for stage in map(one.stages.__getitem__, dict.fromkeys(needed)):
        files = stage.files(run)
        infos = files.infos(files.artifact(stage.name), recursive=True)
        paths = [info.path for info in infos if info.type == arrow_fs.FileType.File]
        for unit in stage.units:
            steps = files.partition(_STEPS, files.trial_id(unit.key))
            paths += filter(files.exists, (files.model(unit.key), steps))
        for path in paths:
            copy = scratch.path(path.removeprefix(f"{run.path()}/"))
            scratch.write(copy, run.read(path), durable=False)


def _set_cache(value: str | None) -> None:
    """Set the folder of the user's cache, or have the default one."""
    os.environ.pop(_CACHE, None)
    if value is not None:
        os.environ[_CACHE] = value
