"""Configurations and experiments that come with raypipe, by name.

In the repository they are its folders ``configs/`` and ``experiments/``. The wheel has them in
``raypipe/shipped`` (see ``hatch_build.py``), where the experiments import each other as
``raypipe.shipped.experiments``, so that they are importable in every process and never clash with a
user's own package ``experiments``. Configurations, run directories and hashes of source code call
them ``experiments.NAME`` in both.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.provenance import package_version

#: the package of the experiments in configurations, and in an installed wheel
LOGICAL, INSTALLED = "experiments", "raypipe.shipped.experiments"
_NAME = re.compile(r"\w[\w-]*(/\w[\w-]*)*")


def folder() -> Path:
    """Return the folder that has ``configs`` and ``experiments``: the wheel's or the repository."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent


def configurations() -> dict[str, Path]:
    """Return the files of the shipped configurations by name, such as ``sweeps/transformer``."""
    configs = folder() / "configs"
    files = sorted(configs.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(configs).with_suffix("").as_posix(): file for file in files}


def file_of(name: str) -> Path:
    """Return the file that a command means: an existing file, or a configuration by name.

    A name has no suffix. It is that of a file ``NAME.yaml`` in the current directory or, if there
    is none, of a shipped configuration.

    Raises:
        ConfigError: there is neither.

    """
    file = Path(name)
    if file.exists():
        return file
    shipped = configurations()
    if not _NAME.fullmatch(name):
        stem = name.removeprefix("configs/").removesuffix(".yaml")
        if stem in shipped:
            raise ConfigError(f"{name}: no such file; {stem} names the one that comes with raypipe")
        return file
    own = file.with_suffix(".yaml")
    if own.is_file():
        return own
    if name in shipped:
        return shipped[name]
    hint = did_you_mean(name, [*shipped, *(each.as_posix() for each in file.parent.glob("*.y*ml"))])
    raise ConfigError(
        f"{name}: neither a file nor a shipped configuration{hint} "
        f"(shipped: {', '.join(shipped) or 'none'})"
    )


def importable(module: str) -> str:
    """Return the name under which a configuration's module can be imported here.

    ``experiments.NAME`` is the user's own if the search path has it, else the shipped one. Any
    other name is returned as it is.
    """
    if not module.startswith(f"{LOGICAL}."):
        return module
    installed = f"raypipe.shipped.{module}"
    return installed if not file_of_module(module) and file_of_module(installed) else module


def missing_packages(module: str) -> list[str]:
    """Return the packages of the extra ``workloads`` that a shipped module lacks here.

    There are none for a module of the user's own.
    """
    file = file_of_module(module)
    if file is None or not file.is_relative_to(folder() / LOGICAL):
        return []
    with suppress(PackageNotFoundError):  # a source tree on sys.path that was never installed
        parts = (text.partition(";") for text in requires("raypipe-runner") or ())
        needed = [package for package, _, marker in parts if "workloads" in marker]
        names = (re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in needed)
        return [name for name in names if package_version(name) is None]
    return []


def listing() -> str:
    """Return a line per shipped configuration: its name, and its file's first line of comment."""
    lines = {name: headline(file) for name, file in configurations().items()}
    width = max(map(len, lines), default=0)
    return "\n".join(f"{name:{width}}  {line}" for name, line in lines.items())


def headline(file: Path) -> str:
    """Return the first line of a configuration, a comment."""
    with file.open(encoding="utf-8") as stream:
        return stream.readline().lstrip("# ").strip()


def hidden(module: str) -> tuple[Path, list[Path]]:
    """Return the file that an importable module is loaded from, and others of the same name.

    The others are on the search path, or come with raypipe.
    """
    used = (file_of_module(importable(module)) or Path()).resolve()
    found = []
    for entry in dict.fromkeys([*sys.path, str(folder())]):
        base = Path(entry, *module.split("."))
        found += [base.with_suffix(".py").resolve(), (base / "__init__.py").resolve()]
    return used, [each for each in dict.fromkeys(found) if each != used and each.is_file()]


def logical_source(content: bytes) -> bytes:
    """Return the source of a module of the shipped experiments as it is in the repository."""
    return content.replace(INSTALLED.encode(), LOGICAL.encode())


def file_of_module(name: str) -> Path | None:
    """Return the file of a module; None without one, as for a folder without ``__init__.py``."""
    with suppress(ImportError, ValueError):  # no parent, a relative name, or no spec
        spec = find_spec(name)
        return Path(spec.origin) if spec is not None and spec.origin is not None else None
    return None
