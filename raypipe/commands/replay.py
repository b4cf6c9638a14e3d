"""``raypipe replay``: compute stored units again, and compare their rows with the stored ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raypipe.commands import cluster
from raypipe.commands.code import edits, kept_code
from raypipe.commands.configuration import resolve
from raypipe.commands.declarations import declared
from raypipe.commands.report import refuse_code_inside, stored_document
from raypipe.commands.row_comparison import Comparison, Replayed
from raypipe.commands.run import CONFIGURATION
from raypipe.commands.run_summary import opened
from raypipe.commands.scratch_stage import ScratchStage
from raypipe.commands.selection import check_training, matrix_or_sweep, selected
from raypipe.config import search_path
from raypipe.config.document import Document, parse
from raypipe.config.shipped import importable
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.pipeline.configuration import Configuration
from raypipe.pipeline.continuation import IDENTITIES
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.stage_units import is_done
from raypipe.provenance import environment_row
from raypipe.redaction import printable, without_secrets
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory, variant_name
from raypipe.sweep.stage import NAME as SWEEP

#: units of a sample, and the relative difference of numbers that count as equal
SAMPLE, TOLERANCE = 3, 1e-5
_UNITS, _MOST_LINES = "units", 30
#: columns of the environment in which the same machine differs a little
_INEXACT = ("memory_bytes", "gpu_memory_bytes")
_SAME = ("equal", "within the tolerance")


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay.

    Attributes:
        run_dir: the run directory.
        stored: the number of its stored units.
        units: those that were computed again.
        changes: what changed since they were stored: code, libraries, hardware.
        not_compared: columns that measure time, memory or speed, or name a place.
        choice: which units were left to another replay, in words.

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
        counts: dict[str, int] = {}
        for each in self.units:
            counts[each.outcome] = counts.get(each.outcome, 0) + 1
        lines = [f"replay of {self.run_dir}: {self.stored} stored units{self.choice}"]
        first = sorted(self.units, key=lambda each: each.outcome in _SAME)[:_MOST_LINES]
        lines += [str(each) for each in self.units if each in first]
        if len(first) < len(self.units):
            lines.append(f"and {len(self.units) - len(first)} more")
        if self.not_compared:
            lines.append(f"not compared: {', '.join(self.not_compared)}")
        nothing = ("nothing that is recorded; does a seed decide all that is random?",)
        changes = self.changes or (nothing if not self.is_equal else ())
        lines += [f"changed since: {each}" for each in changes]
        lines.append(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
        return printable("\n".join(lines), keep="\n")


@dataclass(frozen=True)
class _Stored:
    """A stored unit, and what computes it: a stage of a configuration."""

    configuration: Configuration
    stages: Sequence[Stage]
    stage: Stage
    unit: Unit

    @property
    def name(self) -> str:
        return variant_name(self.unit.key, self.stage.variant)


def replay(
    run_dir: str | os.PathLike[str],
    units: Sequence[str] = (),
    *,
    sample: int = SAMPLE,
    every: bool = False,
    tolerance: float = TOLERANCE,
    kept_code: bool = False,
) -> Replay:
    """Compute stored units again and compare them with what is stored: ``raypipe replay``.

    They are computed in this process, without caches and stores. The run directory is only read.

    Args:
        run_dir: the run directory.
        units: names of units, or what such names begin with, such as a stage.
        sample: how many units are computed, evenly spaced, if none is named.
        every: whether to compute all units.
        tolerance: the relative difference up to which numbers count as equal.
        kept_code: whether to run the code that the run directory keeps, not the current code.

    Raises:
        ConfigError: a mistake, or nothing that can be computed again.

    """
    if sample < 1 or not 0 <= tolerance < 1:
        raise ConfigError("replay: sample must be at least 1, and tolerance from 0 to below 1")
    run = opened(os.fspath(run_dir))
    ledger = Ledger.to_read(run)
    stored = [key for key, row in ledger.items(_UNITS) if row.get("status") == "succeeded"]
    names = [key for key in stored if not units or any(_is_named(key, name) for name in units)]
    for name in units:
        if not any(_is_named(key, name) for key in stored):
            near = did_you_mean(name, stored)
            raise ConfigError(f"{run.shown}: has no stored unit {name!r}{near}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="raypipe-replay-")))
        if kept_code:
            names = _use_kept_code(run, ledger, names, folder / "code", stack)
        found, changed = _find(run, ledger, names, named=bool(units))
        chosen = found if every or units else _sample(found, sample)
        if not chosen and not changed:
            raise ConfigError(f"{run.shown}: has no stored unit that can be computed again")
        changes = _changes(run, ledger, chosen)
        if kept_code and any(each.startswith("code") for each in changes):
            raise ConfigError(
                f"{run.shown}: its kept code is not complete: secrets were left out, or files that "
                "are too large (raypipe show --code); replay with the current code"
            )
        rows = [Replayed(name, "changed", (), reason) for name, reason in changed.items()]
        groups: dict[tuple[int, str], list[_Stored]] = {}
        for each in chosen:
            groups.setdefault((id(each.configuration), each.stage.key), []).append(each)
        not_compared = set[str]()
        for number, group in enumerate(groups.values()):
            one, of_group = group[0], [each.unit for each in group]
            tables = declared(one.configuration.experiment)
            place = folder / str(number)
            scratch = ScratchStage(run, ledger, one.stages, one.stage, of_group, place)
            comparison = Comparison(tables, tolerance)
            rows += scratch.replayed(one.configuration, tables, comparison)
            not_compared |= comparison.not_compared
    left = len(found) - len(chosen)
    choice = f", a sample of {len(chosen)} (choose with --all, --sample or names)" if left else ""
    columns = tuple(sorted(not_compared))
    return Replay(run.shown, len(stored), tuple(rows), tuple(changes), columns, choice)


def _is_named(key: str, name: str) -> bool:
    return key == name or key.startswith((f"{name}/", f"{name}@"))


def _sample(found: Sequence[_Stored], number: int) -> Sequence[_Stored]:
    """Return some units, evenly spaced, the first and the last among them."""
    if number >= len(found):
        return found
    return [found[place * (len(found) - 1) // max(1, number - 1)] for place in range(number)]


def _find(
    run: RunDirectory, ledger: Ledger, names: Sequence[str], *, named: bool
) -> tuple[list[_Stored], dict[str, str]]:
    """Return the stored units that a configuration of the run asks for.

    Units are returned apart, each with the reason, if their result is decided by something else
    now. Sweeps, which measure speed, are left out; if not named, other stages that measure a
    machine or only summarize, too.
    """
    found, changed = dict[str, _Stored](), dict[str, str]()
    nodes = cluster.hardware_of(None)
    for number, document in enumerate(_documents(run, ledger)):
        rest = {name for name in names if name not in found}
        if not rest:
            break
        try:
            refuse_code_inside(run, document.experiment or document.function.partition(":")[0])
            configuration, _ = matrix_or_sweep(resolve(document, (), "auto", nodes), ())
            graph = selected(configuration, (), nodes, confirmed=True)
            check_training(configuration, graph, nodes)
        except ConfigError:
            if number == 0:
                raise
            continue  # an earlier configuration, of data that are gone, say
        growing = graph.growing
        stages = graph.stages if growing is None else growing.growth(ledger).replay(ledger)[0]
        for stage in stages:
            if stage.name == SWEEP or not (named or (stage.portable and not stage.always_rerun)):
                continue
            for unit in stage.units:
                one = _Stored(configuration, stages, stage, unit)
                if one.name in rest and is_done(stage.seen(ledger), unit):
                    found[one.name] = one
                elif one.name in rest:
                    changed.setdefault(one.name, _difference(stage, unit, ledger))
    return [*found.values()], {k: why for k, why in changed.items() if k not in found}


def _documents(run: RunDirectory, ledger: Ledger) -> Iterator[Document]:
    """Yield the configurations of the run's commands, the newest first."""
    newest = stored_document(run)
    if newest.function.startswith("__main__:"):
        raise ConfigError(
            f"{run.shown}: {newest.function.partition(':')[2]} was a function of a notebook or a "
            "script, which this process does not have; only functions of modules can be replayed"
        )
    yield newest
    earlier = [row["text"] for k, row in ledger.items("runs") if k.startswith(CONFIGURATION)]
    for text in reversed(earlier):
        yield parse(text, f"{run.shown}: an earlier configuration")


def _difference(stage: Stage, unit: Unit, ledger: Ledger) -> str:
    """Return what decides a unit's result and is not as it was."""
    stored = stage.seen(ledger).get(_UNITS, unit.key) or {}
    shared = ledger.get(IDENTITIES, str(stored.get("shared"))) or {}
    differing: dict[str, Any] = {}
    if unit.identity is not None and stored.get("fingerprint") != unit.fingerprint:
        differing = without_secrets(unit.identity.differences(stored, shared))
    texts = [f"{key}: stored {old!r}, now {new!r}" for key, (old, new) in differing.items()]
    return f"cannot be computed as it was: {'; '.join(texts) or 'what it needs has gone on'}"


def _use_kept_code(
    run: RunDirectory, ledger: Ledger, names: Sequence[str], folder: Path, stack: ExitStack
) -> list[str]:
    """Import the kept code of the newest unit, until the stack closes; return the units it ran."""
    rows = {name: ledger.get(_UNITS, name) or {} for name in names}
    newest = max(rows.values(), key=lambda row: str(row.get("finished_at")), default={})
    version = str(newest.get("code"))
    files = kept_code(run, version)
    if not files:
        raise ConfigError(f"{run.shown}: does not keep the code of its units; replay without it")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for package in path.relative_to(folder).parents[:-1]:  # else another of its name is used
            (folder / package / "__init__.py").touch()
    stack.enter_context(search_path.preferring(folder))
    modules = (ledger.get("code", version) or {}).get("modules", ())

    def forget() -> None:
        for module in modules:
            sys.modules.pop(importable(module), None)

    stack.callback(forget)
    forget()
    return [name for name, row in rows.items() if row.get("code") == version]


def _changes(run: RunDirectory, ledger: Ledger, chosen: Sequence[_Stored]) -> list[str]:
    """Return what changed since the units were stored: code, libraries, hardware."""
    found: dict[str, None] = {}
    ran = {(ledger.get(_UNITS, each.name) or {}).get("code"): each for each in chosen}
    for version, one in ran.items():
        source = one.configuration.source()
        if version and version != source.fingerprint:
            files = kept_code(run, version)
            modules = (ledger.get("code", version) or {}).get("modules", {})
            texts = edits(files, source.files) if files else source.changes(modules)
            found |= dict.fromkeys(f"code: {text}" for text in texts or ("secrets in it",))
    rows = ledger.rows("environment")
    for key, value in environment_row().items() if rows else ():
        earlier = dict.fromkeys(row.get(key) for row in rows)
        if value not in earlier and key not in _INEXACT:
            found[f"{key}: {', '.join(map(str, earlier))} -> {value}"] = None
    return list(found)
