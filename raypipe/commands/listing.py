"""The runs in a folder, and their rows in ``raypipe ls``."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from pyarrow import fs as arrow_fs

from raypipe.commands.summary import Summary, seconds_since, summary
from raypipe.commands.table_view import view
from raypipe.errors import ConfigError
from raypipe.graph.progress import rough
from raypipe.store import run_notes
from raypipe.store.run_directory import RunDirectory, is_run

#: folders below the given one in which runs are looked for, one inside the other
_DEPTH = 4
#: listings and readings at the same time, which an object store answers slowly one by one
_THREADS = 16

#: runs by location, with the names, times and sizes of their files when they were read
Seen = dict[str, tuple[Any, Summary]]


def runs(location: str, seen: Seen | None = None) -> list[Summary]:
    """Return the runs in a folder and those below, the newest first.

    Args:
        location: the folder.
        seen: the runs of an earlier call with it; one that has ended is read again once its files
            have changed.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.

    """
    root, seen = RunDirectory.at(location), {} if seen is None else seen
    path, found, level = root.path(), list[Summary](), [root]
    try:
        problem = "is a file; `raypipe ls DIR` looks in a folder" if root.is_file else ""
        if not root.exists(path) and not root.list(path):
            problem = "does not exist; `raypipe ls DIR` looks in DIR"
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in range(0 if problem else _DEPTH + 1):
                looks = list(threads.map(partial(_look, seen), level))
                found += [each for each, _ in looks if each is not None]
                level = [folder for _, below in looks for folder in below]
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {error}"
    if problem:
        raise ConfigError(f"{root.shown}: {problem}")
    for gone in seen.keys() - {each.run.location for each in found}:
        del seen[gone]
    return sorted(found, key=lambda each: seconds_since(each.details.started_at))


def _look(seen: Seen, folder: RunDirectory) -> tuple[Summary | None, list[RunDirectory]]:
    """Return the summary of a run directory; of another folder those in it."""
    try:
        infos = folder.infos(folder.path())
        if is_run({info.base_name for info in infos}):
            of_files = (i for i in infos if i.type == arrow_fs.FileType.File)
            state = frozenset((i.base_name, i.mtime_ns, i.size) for i in of_files)
            before, known = seen.get(folder.location, (None, None))
            if known is None or before != state or known.status in ("running", "unknown"):
                known = replace(summary(folder), notes=run_notes.read(folder))
                seen[folder.location] = state, known
            return known, []
    except (OSError, ConfigError):  # removed meanwhile, or another user's
        return None, []
    names = sorted(i.base_name for i in infos if i.type == arrow_fs.FileType.Directory)
    usable = (name for name in names if not name.startswith(".") and name.isprintable())
    return None, [folder.inside(name) for name in usable]


def cells(found: Sequence[Summary], location: str) -> list[dict[str, str]]:
    """Return what a table of runs shows of each; paths begin as the location does."""
    base, rows = RunDirectory.at(location), []
    for each in found:
        path = each.run.shown
        if base.is_local:
            rest = path.removeprefix(base.path()).lstrip("/")
            path = "/".join(filter(None, (location.rstrip("/"), rest)))
        counted = f"{each.details.done}/{each.details.stages}" if each.details.stages else ""
        row = {
            "run": path,
            "experiment": each.details.experiment,
            "status": each.status,
            "started": each.ago,
            "took": "" if each.duration_s is None else rough(each.duration_s),
            "stages": " ".join(filter(None, (counted, each.progress and f"({each.progress})"))),
            "result": each.details.result,
            "tags": " ".join(each.notes.tags),
            "note": each.notes.note,
        }
        rows.append(row)
    return rows


def listing_text(
    found: Sequence[Summary], location: str, width: int | None, tags: Sequence[str] = ()
) -> str:
    """Return runs as a table, which have these tags."""
    if not (rows := cells(found, location)):
        return " with tag ".join([f"no runs in {RunDirectory.at(location).shown}", *tags])
    needless = {name for name in ("tags", "note") if not any(row[name] for row in rows)}
    if all(row["experiment"] in row["run"].split("/") for row in rows):
        needless.add("experiment")
    rows = [{name: row[name] for name in row if name not in needless} for row in rows]
    first = ("run", "result", "status", "tags", "stages", "started")
    return view(rows, width, whole=True, first=first, kept=3, how="them on a wider terminal")
