"""Units of a stored stage, computed again in a scratch run directory.

The stage runs by itself, in this process, with the rows and files of the stages before it, but
nothing that it wrote itself. Caches, stores and trackers are not used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

from pyarrow import fs as arrow_fs

from raypipe.commands import cluster
from raypipe.commands.row_comparison import Comparison, Replayed
from raypipe.integrations.tracking import Target, Trackers
from raypipe.pipeline.configuration import Configuration
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.progress import Display
from raypipe.pipeline.runner import run_stages
from raypipe.pipeline.session import Session
from raypipe.pipeline.sharing import NOT_RESULTS
from raypipe.storage.ledger import Ledger, Row
from raypipe.storage.ledger_view import writes
from raypipe.storage.run_directory import BASE, RunDirectory, variant_name
from raypipe.storage.tables import Table, read_rows

_UNITS, _STEPS, _REPLAY = "units", "steps", "replay"
_CACHE = "RAYPIPE_CACHE"


class ScratchStage:
    """A stage of a run directory, with the units to compute again.

    Args:
        run: the run directory, which is only read.
        ledger: its ledger.
        stages: the stages of a configuration.
        stage: the one of them to compute.
        units: its units to compute.
        folder: an empty local folder.

    """

    def __init__(
        self,
        run: RunDirectory,
        ledger: Ledger,
        stages: Sequence[Stage],
        stage: Stage,
        units: Sequence[Unit],
        folder: Path,
    ) -> None:
        self._run, self._ledger = run, ledger
        self._stages = {each.key: each for each in stages}
        self._stage = replace(stage, units=units)
        self._scratch, self._cache = RunDirectory.at(folder / "run"), folder / "cache"
        self._tables = [t for t in ledger.tables() if writes(ledger, stage.key, t)]
        self._owners: dict[tuple[str, str], str] = {}  # the stage of a unit by variant and key
        for key, row in ledger.items(_UNITS):
            variant = row.get("variant", BASE)
            self._owners[variant, key.removesuffix(f"@{variant}")] = str(row["stage"])

    def replayed(
        self, configuration: Configuration, tables: Mapping[str, Table], comparison: Comparison
    ) -> list[Replayed]:
        """Compute the units; return how each compares, and tables with rows that they share."""
        copied = self._copied_rows()
        fresh = Ledger(self._scratch)
        fresh.put_tables(copied)
        failure = self._compute(configuration, tables, fresh)
        keys = {unit.key for unit in self._stage.units}
        stored: dict[str, dict[tuple[str, str], Row]] = {key: {} for key in keys}
        now: dict[str, dict[tuple[str, str], Row]] = {key: {} for key in keys}
        for table in self._tables:
            for key, row in self._ledger.items(table):
                if self._is_own(table, key, row) and (owner := self._owner(key, row)) in keys:
                    stored[str(owner)][table, key] = row
        for table in set(fresh.tables()) - NOT_RESULTS:
            for key, row in fresh.items(table):
                if key not in copied.get(table, {}):
                    owner, only = self._owner(key, row), next(iter(keys))
                    group = owner if owner in keys else only if len(keys) == 1 else table
                    now.setdefault(str(group), {})[table, key] = row
                    if (earlier := self._ledger.get(table, key)) is not None:
                        stored.setdefault(str(group), {})[table, key] = earlier
        for key in keys if self._stage.training is not None else ():
            stored[key] |= self._steps(self._run, key)
            now[key] |= self._steps(self._scratch, key)
        found = []
        for group in [*(unit.key for unit in self._stage.units), *sorted(now.keys() - keys)]:
            name = variant_name(group, self._stage.variant)
            if group not in keys:
                name = f"{name}, rows of several units of {self._stage.name}"
            elif (fresh.get(_UNITS, name) or {}).get("status") != "succeeded":
                found.append(Replayed(name, "failed", (), failure or "did not finish"))
                continue
            found.append(comparison.of(name, stored.get(group, {}), now[group]))
        return found

    def _compute(
        self, configuration: Configuration, tables: Mapping[str, Table], fresh: Ledger
    ) -> str | None:
        """Run the stage; the stages before it count as done. Return why it failed."""
        needed = [replace(self._stages[k], units=(), needs=()) for k in self._stage.needed_keys]
        for each in self._before():
            self._copy_files(each)
        target = Target(self._scratch, _REPLAY, configuration.experiment.name, {})
        with (
            redirect_stdout(sys.stderr),
            _environment(_CACHE, str(self._cache)),  # else values of other runs would be taken
            Display(live=False) as display,
        ):
            session = Session(
                self._scratch,
                _REPLAY,
                fresh,
                cluster.local(),
                display,
                cluster.hardware_of(None),
                Trackers((), target),
                configuration.settings,
                tables,
            )
            return run_stages([*needed, self._stage], session)

    def _owner(self, key: str, row: Row) -> str | None:
        """Return the unit whose result a row is, by its key or a column; None if none is named."""
        variant = str(row.get("variant", BASE))
        while key.endswith(f"@{variant}"):
            key = key.removesuffix(f"@{variant}")
        while key and (variant, key) not in self._owners:
            key = key.rpartition("/")[0]
        named = (key, row.get("unit"), row.get("stage"))
        return next((str(each) for each in named if (variant, each) in self._owners), None)

    def _is_own(self, table: str, key: str, row: Row) -> bool:
        """Whether the stage wrote a row, for one of its units or for several."""
        variant, owner = str(row.get("variant", BASE)), self._owner(key, row)
        if variant != self._stage.variant or table not in self._tables:
            return False
        return owner is None or self._owners[variant, owner] == self._stage.name

    def _copied_rows(self) -> dict[str, dict[str, Row]]:
        """Return the rows that the stage may see, without its own."""
        visible = {self._stage.variant, *self._stage.variants.values()}
        tables = {*self._ledger.tables()} - NOT_RESULTS | {"environment"}
        return {
            table: {
                key: row
                for key, row in self._ledger.items(table)
                if row.get("variant", BASE) in visible and not self._is_own(table, key, row)
            }
            for table in sorted(tables)
        }

    def _before(self) -> list[Stage]:
        """Return the stages that the stage needs, also through others."""
        found, pending = dict[str, Stage](), [*self._stage.needed_keys]
        while pending:
            if (key := pending.pop()) not in found:
                found[key] = self._stages[key]
                pending += found[key].needed_keys
        return list(found.values())

    def _copy_files(self, stage: Stage) -> None:
        """Copy what a stage left for later ones: artifacts, weights, logged steps."""
        files = stage.files(self._run)
        infos = files.infos(files.artifact(stage.name), recursive=True)
        paths = [info.path for info in infos if info.type == arrow_fs.FileType.File]
        for unit in stage.units:
            steps = files.partition(_STEPS, files.trial_id(unit.key))
            paths += filter(files.exists, (files.model(unit.key), steps))
        for path in paths:
            copy = self._scratch.path(path.removeprefix(f"{self._run.path()}/"))
            self._scratch.write(copy, self._run.read(path), durable=False)

    def _steps(self, run: RunDirectory, unit: str) -> dict[tuple[str, str], Row]:
        """Return the logged steps of a training."""
        files = self._stage.files(run)
        rows = read_rows(files, _STEPS, files.trial_id(unit))
        return {(_STEPS, f"{unit}/{row['step']}"): row for row in rows}


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable in the body."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
