"""``raypipe ls``: the run directories below a folder, the newest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyarrow import fs as arrow_fs

from raypipe.commands.run_summary import Summary, summary
from raypipe.commands.table_view import view
from raypipe.errors import ConfigError
from raypipe.graph.progress import rough
from raypipe.store.run_directory import RunDirectory, is_run

#: folders below the given one in which runs are looked for, one inside the other
_DEPTH = 4
#: listings and readings at the same time, which an object store answers slowly one by one
_THREADS = 16


def runs(location: str) -> list[Summary]:
    """Return the runs in a folder and those below, the newest first.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.

    """
    root = RunDirectory.at(location)
    try:
        if not root.exists(root.path()) and not root.list(root.path()):
            raise ConfigError(f"{root.shown}: does not exist; `raypipe ls DIR` looks in DIR")
        if root.is_file:
            raise ConfigError(f"{root.shown}: is a file; `raypipe ls DIR` looks in a folder")
        with ThreadPoolExecutor(_THREADS) as threads:
            found = [each for each in threads.map(_summary, run_directories(root, threads)) if each]
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{root.shown}: cannot be read: {error}") from error
    oldest = datetime.fromtimestamp(0, UTC)
    return sorted(found, key=lambda each: each.started_at or oldest, reverse=True)


def run_directories(root: RunDirectory, threads: ThreadPoolExecutor) -> list[RunDirectory]:
    """Return the run directories in a folder and those below; nothing inside of them counts."""
    found: list[RunDirectory] = []
    level = [root]
    for _ in range(_DEPTH + 1):
        below: list[RunDirectory] = []
        for folder, (is_found, names) in zip(level, threads.map(_listed, level), strict=True):
            if is_found:
                found.append(folder)
            else:
                below += [folder.inside(name) for name in names]
        level = below
    return found


def table(found: Sequence[Summary], location: str, width: int | None) -> str:
    """Return the runs as a table; paths begin as the location does."""
    if not found:
        return f"no runs in {RunDirectory.at(location).shown}"
    rows = [_row(each, location) for each in found]
    if all(row["experiment"] in row["run"].split("/") for row in rows):
        rows = [{k: v for k, v in row.items() if k != "experiment"} for row in rows]
    first = ("run", "result", "status", "stages", "started")
    return view(
        pa.Table.from_pylist(rows),
        width,
        whole=True,
        first=first,
        kept=3,
        by_words=("result",),
        how="them with --json",
    )


def as_json(found: Iterable[Summary]) -> list[dict[str, Any]]:
    """Return the runs as plain values."""
    return [
        {
            "run_dir": each.run.shown,
            "experiment": each.experiment,
            "status": each.status,
            "message": each.message,
            "started_at": each.started_at and each.started_at.isoformat(),
            "duration_s": each.duration_s,
            "stages_ended": each.ended,
            "stages": each.stages,
            "result": each.details and each.details.key_result and vars(each.details.key_result),
        }
        for each in found
    ]


def ago(at: datetime | None) -> str:
    """Return how long ago a time is: ``3 min ago``."""
    return "" if at is None else f"{rough(max(0.0, (datetime.now(UTC) - at).total_seconds()))} ago"


def _listed(folder: RunDirectory) -> tuple[bool, list[str]]:
    """Return whether a folder is a run directory, and the names of its folders."""
    try:
        infos = folder.infos(folder.path())
    except OSError:  # another user's
        return False, []
    names = {info.base_name for info in infos}
    folders = [i.base_name for i in infos if i.type == arrow_fs.FileType.Directory]
    usable = (n for n in folders if not n.startswith(".") and n.isprintable())
    return is_run(names), sorted(usable)


def _summary(run: RunDirectory) -> Summary | None:
    try:
        return summary(run)
    except OSError:  # removed meanwhile, or another user's
        return None


def _row(each: Summary, location: str) -> dict[str, str]:
    base = RunDirectory.at(location)
    path, progress = each.run.shown, each.progress
    stages = f"{each.ended}/{each.stages}" if each.stages else ""
    if base.is_local and path.startswith(base.path()):
        rest = path.removeprefix(base.path()).lstrip("/")
        path = "/".join(filter(None, (location.rstrip("/"), rest)))
    return {
        "run": path,
        "experiment": each.experiment,
        "status": each.status,
        "started": ago(each.started_at),
        "took": "" if each.duration_s is None else rough(each.duration_s),
        "stages": " ".join(filter(None, (stages, progress and f"({progress})"))),
        "result": each.result,
    }
