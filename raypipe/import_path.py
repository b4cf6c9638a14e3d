"""Search path of a user's modules: in this process, and for the workers that it starts."""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

#: variable by which workers receive the search path
VARIABLE = "RAYPIPE_SEARCH_PATH"
#: modules of Python, and packages that raypipe and Ray cannot do without
PROTECTED = frozenset(
    sys.stdlib_module_names
    | {"ray", "torch", "numpy", "scipy", "sklearn", "pandas", "pyarrow", "pydantic", "yaml"}
    | {"matplotlib", "typer", "click", "rich", "psutil", "filelock", "jinja2", "optuna"}
    | {"packaging", "requests", "google", "msgpack", "jsonschema", "aiohttp", "tqdm", "grpc"}
)
#: Python's own folders, and the archive of the standard library, which need not exist
_OWN = frozenset({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_ARCHIVE = f"python{sys.version_info.major}{sys.version_info.minor}.zip"


def prefer(*folders: Path) -> None:
    """Put the current directory, and folders after it, first on ``sys.path``."""
    sys.path[:] = dict.fromkeys([*map(str, (Path.cwd(), *folders)), *sys.path])


def of_workers() -> str:
    """Return the search path for workers, so that they import what this process does.

    It begins with the current directory, and has what precedes Python's own modules on
    ``sys.path``: folders of configurations, and of a script or notebook. It is not ``PYTHONPATH``:
    Ray's own processes would import a user's ``random.py``.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = map(os.path.abspath, sys.path[: _first_own()])
    entries = [str(Path.cwd()), *folders, *filter(None, given)]
    return os.pathsep.join(dict.fromkeys(entries))


def adopt() -> None:
    """Put the search path that a command gave its workers first on ``sys.path``."""
    wanted = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([*wanted, *sys.path])


def shadowing() -> list[str]:
    """Return the files of the current directory that no import gets, because of their names."""
    return sorted(f"{name}.py" for name in PROTECTED if Path(f"{name}.py").is_file())


class Protected:
    """Finder of the modules that raypipe and Ray import, also if the user has files of their names.

    Otherwise a file ``random.py`` in the current directory would reach into every package.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module after the user's folders; None for a name that is not protected."""
        if path is not None or name not in PROTECTED:
            return None
        return PathFinder.find_spec(name, sys.path[_first_own() :], target)


def protect() -> None:
    """Let Python's modules and raypipe's packages come before the user's files of their names."""
    if Protected not in sys.meta_path:
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
        sys.meta_path.insert(place, Protected)


def _first_own() -> int:
    """Return the position of Python's own modules on ``sys.path``."""
    places = enumerate(sys.path)
    return next((i for i, e in places if e in _OWN or e.rpartition(os.sep)[2] == _ARCHIVE), 0)
