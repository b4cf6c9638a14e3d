"""Search path of a user's modules: in this process, and for the workers that it starts."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path


def prefer(*folders: Path) -> None:
    """Put the current directory, and folders after it, first on ``sys.path``."""
    wanted = list(dict.fromkeys(str(folder) for folder in (Path.cwd(), *folders)))
    sys.path[:] = [*wanted, *(entry for entry in sys.path if entry not in wanted)]


def of_workers() -> str:
    """Return ``PYTHONPATH`` for workers, so that they import what this process does.

    It begins with the current directory, and has what precedes Python's own modules on
    ``sys.path``: folders of configurations, and of a script or notebook.
    """
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    end = next((i for i, entry in enumerate(sys.path) if entry in own or _is_zip(entry)), 0)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [str(Path.cwd()), *map(os.path.abspath, sys.path[:end]), *filter(None, given)]
    return os.pathsep.join(dict.fromkeys(entries))


def _is_zip(entry: str) -> bool:
    """Whether an entry is the archive of Python's standard library, which need not exist."""
    return Path(entry).name == f"python{sys.version_info.major}{sys.version_info.minor}.zip"
