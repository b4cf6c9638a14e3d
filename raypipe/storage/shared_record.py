"""Small JSON records in the user's cache, which several processes read and update."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock
from pydantic import BaseModel

from raypipe.storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

Record = TypeVar("Record", bound=BaseModel)


def read(path: Path, kind: type[Record]) -> Record | None:
    """Return a record; None if there is none, or with a warning if it cannot be read."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s: ignored, since it is damaged: %s", path, error)
        return None


def update(
    path: Path, kind: type[Record], change: Callable[[Record | None], Record], what: str
) -> None:
    """Replace a record by what ``change`` returns for it, while other processes wait.

    If the folder cannot be written, a warning says that ``what`` cannot be kept.
    """
    try:
        with FileLock(path.with_suffix(".lock"), fallback_to_soft=False):
            record = change(read(path, kind))
            folder = RunDirectory.at(path.parent)  # writes are atomic
            folder.write(folder.path(path.name), record.model_dump_json(indent=2).encode())
    except OSError as error:
        log.warning("%s: the %s cannot be kept: %s", path, what, error)
