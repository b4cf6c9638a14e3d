"""Sharing of results between run directories: what a stage stores in, and takes from, a store.

An entry of the store (:mod:`raypipe.storage.store`) holds a whole stage: the rows that it put into
the ledger, its artifacts, and of a training its weights and logged steps. Its name is the hash of
the identities and budgets of the stage's units, of the budgets of what they need, and of the
experiment's source code: results of other code are never taken.
"""

from __future__ import annotations

import getpass
import io
import json
import logging
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as arrow_fs

from raypipe.pipeline.identity import fingerprint, stage_fingerprint
from raypipe.provenance import git_commit, now, package_version
from raypipe.storage import parquet
from raypipe.storage.ledger import INTERNAL, Ledger, Row
from raypipe.storage.ledger_view import LedgerView
from raypipe.storage.run_directory import BASE, RunDirectory, variant_name
from raypipe.storage.store import DamagedError

if TYPE_CHECKING:
    from raypipe.pipeline.context import StageContext

log = logging.getLogger(__name__)

_Renamed = Callable[[str], str]

#: an entry of the ledger's table ``runs``: a stage that began with a store
_BEGAN = "began"
_ROWS = ("rows",)
_MODEL, _ARTIFACT = "model", "artifact"
#: tables that are not part of the result of a stage
NOT_RESULTS = INTERNAL | {"failures", "stages", "reused", "environment"}


class RecordedView(LedgerView):
    """A stage's view of the ledger that keeps what the stage puts."""

    def __init__(self, ledger: Ledger, variant: str, visible: Iterable[str], stage: str) -> None:
        super().__init__(ledger, variant, visible, stage)
        self.recorded: dict[str, dict[str, Row]] = {}

    def put_tables(self, tables: Mapping[str, Mapping[str, Row]]) -> None:
        """Record rows of several tables with one disk sync."""
        super().put_tables(tables)
        for table, rows in tables.items():
            if table not in NOT_RESULTS:
                self.recorded.setdefault(table, {}).update(rows)

    def remove(self, table: str, keys: Iterable[str]) -> None:
        """Remove rows of this variant durably; missing ones are ignored."""
        removed = list(keys)
        super().remove(table, removed)
        for key in removed:
            self.recorded.get(table, {}).pop(key, None)


def can_share(context: StageContext) -> bool:
    """Whether the results of a stage may be stored and taken: a store, and a portable stage."""
    stage, session = context.stage, context.session
    return session.store is not None and stage.portable and not stage.always_rerun


def begin(context: StageContext) -> bool:
    """Record that a stage begins; return whether all that it computes can be stored.

    Rows of an earlier command that was killed cannot be told apart from those of other stages; only
    a training records all of its rows at its end.
    """
    if not can_share(context):
        return False
    key = f"{_BEGAN}/{context.stage.key}"
    ledger = context.session.ledger
    untouched = len(context.unfinished()) == len(context.stage.units)
    first = untouched and ledger.get("runs", key) is None
    if first:
        ledger.put("runs", {key: {"at": now()}})
    return first or context.stage.training is not None


def share(context: StageContext) -> None:
    """Store what a finished stage computed."""
    store, view = context.session.store, context.ledger
    if store is None or not isinstance(view, RecordedView):
        return
    names = {
        name: variant_name(name, variant)
        for name, variant in dict(context.run_dir.variants).items()
    }
    rows = {"tables": view.recorded, "names": names}
    parts = chain([(_ROWS, json.dumps(rows).encode())], _files(context))
    store.put(_name(context), _about(context), parts)


def take(context: StageContext) -> bool:
    """Take a stage's results from the store if they are there; return whether they were.

    A damaged entry is removed, with a warning; nothing of it is taken.
    """
    store, stage = context.session.store, context.stage
    if not can_share(context) or store is None or len(context.unfinished()) != len(stage.units):
        return False
    name = _name(context)
    try:
        entry = store.get(name)
        if entry is None:
            return False
        places = {
            part.place: content if part.place == _ROWS else None
            for part, content in store.contents(entry)
        }
        rows = json.loads(places[_ROWS] or b"")
        tables, renamed = rows["tables"], _renaming(rows["names"], context.run_dir)
        for part, content in store.contents(entry):  # again: one file at a time is in memory
            if part.place != _ROWS:
                _write(context, part.place, content, renamed)
    except (DamagedError, KeyError, ValueError, RecursionError) as error:
        message = f"damaged in the store {store.shown}, computed again: {error}"
        log.warning("%s: %s", stage.key, message)
        context.say(f"WARNING: {message}")
        store.discard(name)
        return False
    taken = {
        table: {
            renamed(key) if row.get("trial_id") == key else key: _own(row, renamed)
            for key, row in of_table.items()
        }
        for table, of_table in tables.items()
    }
    about = {key: entry.about.get(key) for key in _PROVENANCE}
    reused = {"stage": stage.name, **about, "fingerprint": name, "store": store.shown}
    context.finish_all(stage.units, {**taken, "reused": {stage.name: reused}})
    whom = f"{about['user']} on {about['host']}"
    context.say(f"taken from the store ({whom}, {str(about['computed_at'])[:16]})")
    return True


#: columns of the table ``reused`` that an entry provides
_PROVENANCE = (
    "user",
    "host",
    "computed_at",
    "git_commit",
    "git_dirty",
    "raypipe",
    "torch",
    "device",
    "source_run_id",
)


def _about(context: StageContext) -> dict[str, Any]:
    commit = git_commit()
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container without an entry for its user
        user = "unknown"
    return {
        "stage": context.stage.name,
        "variant": context.stage.variant,
        "units": len(context.stage.units),
        "user": user,
        "host": platform.node(),
        "computed_at": now(),
        "git_commit": commit and commit.rstrip("+"),
        "git_dirty": commit and commit.endswith("+"),
        "raypipe": package_version("raypipe-runner"),
        "torch": package_version("torch"),
        "device": context.device,
        "source_run_id": context.session.run_id,
    }


def _name(context: StageContext) -> str:
    stage = context.stage
    extents = [[unit.extent, unit.extents] for unit in stage.units]
    return fingerprint([stage_fingerprint(stage), extents, stage.name, context.session.code])


def _files(context: StageContext) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Yield the files of a stage, each with its place: kind, unit or table, and name."""
    run_dir, stage = context.run_dir, context.stage
    root = run_dir.artifact(stage.name)
    for info in run_dir.infos(root, recursive=True):
        if info.type == arrow_fs.FileType.File:
            yield (
                (_ARTIFACT, *info.path.removeprefix(f"{root}/").split("/")),
                run_dir.read(info.path),
            )
    if stage.training is None:
        return
    for unit in stage.units:
        if run_dir.exists(run_dir.model(unit.key)):
            yield (_MODEL, unit.key), run_dir.read(run_dir.model(unit.key))
        for table, suffix in _partitions(run_dir, unit.key):
            path = run_dir.partition(table, f"{run_dir.trial_id(unit.key)}{suffix}")
            yield (table, unit.key, suffix), run_dir.read(path)


def _partitions(run_dir: RunDirectory, unit: str) -> Iterator[tuple[str, str]]:
    """Yield the tables of which a training has files, and the end of each file's name."""
    base = run_dir.partition("steps", run_dir.trial_id(unit)).rpartition("/")[2]
    stem = re.escape(base.removesuffix(".parquet"))
    for table, ending in (("steps", ""), ("gpu_samples", r"-\d+-\d+")):
        for name in run_dir.list(run_dir.table(table)):
            if found := re.fullmatch(rf"{stem}({ending})\.parquet", name):
                yield table, found[1]


def _write(
    context: StageContext, place: tuple[str, ...], content: bytes, renamed: _Renamed
) -> None:
    run_dir = context.run_dir
    kind, *rest = place
    if kind == _ARTIFACT:
        run_dir.write(run_dir.artifact(context.stage.name, *rest), content)
    elif kind == _MODEL:
        run_dir.write(run_dir.model(rest[0]), content)
    else:
        unit, suffix = rest
        path = run_dir.partition(kind, f"{run_dir.trial_id(unit)}{suffix}")
        run_dir.write(path, _own_rows(content, context, renamed))


def _own_rows(content: bytes, context: StageContext, renamed: _Renamed) -> bytes:
    """Return the rows of a Parquet file as rows of this run."""
    table = pq.read_table(io.BytesIO(content))
    own: dict[str, Any] = {
        "run_id": [context.session.run_id] * len(table),
        "variant": [context.stage.variant] * len(table),
    }
    if "trial_id" in table.column_names:
        own["trial_id"] = [renamed(name) for name in table["trial_id"].to_pylist()]
    for name, values in own.items():
        if (index := table.column_names.index(name) if name in table.column_names else -1) >= 0:
            field = table.schema.field(index)
            table = table.set_column(index, field, pa.array(values, field.type))
    return parquet.to_bytes(table)


def _own(row: Row, renamed: _Renamed) -> Row:
    row = {name: value for name, value in row.items() if name != "variant"}
    return {**row, "trial_id": renamed(row["trial_id"])} if "trial_id" in row else row


def _renaming(stored: Mapping[str, str], run_dir: RunDirectory) -> _Renamed:
    """Return a function from a trial's stored name to its name in this run directory."""
    own = dict(run_dir.variants)
    names = {old: variant_name(stage, own.get(stage, BASE)) for stage, old in stored.items()}

    def renamed(trial: str) -> str:
        first, slash, rest = trial.partition("/")
        # a run without a matrix stores plain names, also of stages needed through others
        name = names.get(first) or variant_name(first, own.get(first, BASE))
        return f"{name}{slash}{rest}"

    return renamed
