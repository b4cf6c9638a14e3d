"""Files for a cluster of one's own: SLURM, Kubernetes or AWS, from templates with its sizes."""

from __future__ import annotations

import math
import platform
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from raypipe.commands import seconds_of
from raypipe.errors import ConfigError
from raypipe.provenance import package_version

#: the script of a job of SLURM, and what the nodes of the others install
SCRIPT, _PACKAGES = "raypipe.sbatch", "requirements.txt"
_FILES = {
    "slurm": (SCRIPT,),
    "kubernetes": (
        "kubernetes/Dockerfile",
        "kubernetes/Dockerfile.dockerignore",
        "kubernetes/rayjob.yaml",
        _PACKAGES,
    ),
    "aws": ("cluster.yaml", _PACKAGES),
}
_NUMBER = (r"[1-9]\d*", "a number from 1")
#: the sizes of a cluster: form, the form in words, and the default of each kind that has it
_SIZES: dict[str, tuple[str, str, dict[str, int | str]]] = {
    "jobs": (*_NUMBER, {"slurm": 1}),
    "nodes": (*_NUMBER, {"slurm": 1, "kubernetes": 8, "aws": 8}),
    "cpus": (*_NUMBER, {"slurm": 8, "kubernetes": 16}),
    "memory": (
        r"[1-9]\d*[MGT]",
        "a number with M, G or T, such as 64G",
        {"slurm": "32G", "kubernetes": "32G"},
    ),
    "gpus": (r"\d+", "a number from 0", {"slurm": 0, "kubernetes": 1}),
    "time": (".*", "a time", {"slurm": "24:00:00"}),
    "account": (r"\S+", "a name without spaces", {"slurm": ""}),
    "partition": (r"\S+", "a name without spaces", {"slurm": ""}),
}


def kind_of(given: Mapping[str, Any]) -> str:
    """Return the kind of cluster among the arguments of a verb; empty without one.

    Raises:
        ConfigError: there are several.

    """
    kinds = [kind for kind in _FILES if given.get(kind)]
    if len(kinds) > 1:
        raise ConfigError(f"{', '.join(f'--{kind}' for kind in kinds)}: give one of them")
    return "".join(kinds)


def sizes_of(kind: str, given: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, int | str]:
    """Return the sizes that a verb was given, next to its other arguments, in their form.

    Raises:
        ConfigError: the kind of cluster does not have one of them, or its value is wrong.

    """
    checked = dict(sizes)
    for name, value in sizes.items():
        if name not in _SIZES:
            raise TypeError(f"unexpected keyword argument {name!r}")
        form, words, defaults = _SIZES[name]
        if kind not in defaults:
            kinds = " or ".join(f"--{each}" for each in defaults if each in given)
            raise ConfigError(f"--{name}: belongs to {kinds}; leave it out")
        if not re.fullmatch(form, str(value)):
            raise ConfigError(f"--{name} {value}: must be {words}")
        if name == "time":
            seconds = math.ceil(seconds_of(value, "--time"))  # 0:00:00 would be no limit
            checked[name] = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return checked


def text_of(file: str, kind: str, sizes: Mapping[str, int | str], folder: Path = Path()) -> str:
    """Return the text of a file of a cluster for the project in a folder. Raises ConfigError."""
    packaging, package = folder / "pyproject.toml", dict[str, Any]()
    if packaging.is_file():
        try:
            package = dict(tomllib.loads(packaging.read_text(encoding="utf-8")).get("project", {}))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{packaging}: is not readable: {error}") from error
    name = str(package.get("name", folder.resolve().name))
    environment = Environment(
        loader=PackageLoader("raypipe.commands", "templates/cluster"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(file).render(
        {**{name: d[kind] for name, (_, _, d) in _SIZES.items() if kind in d}, **sizes},
        project=re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "project",
        config=_configuration(folder),
        is_package=bool(package),
        python=".".join(platform.python_version_tuple()[:2]),
        raypipe=package_version("raypipe-runner"),
        ray=package_version("ray"),
    )


def write(kind: str, folder: Path, sizes: Mapping[str, int | str]) -> str:
    """Write the files of a kind of cluster into the folder of a project; return what to do next.

    A list of packages that is there stays.

    Raises:
        ConfigError: another file is there, or cannot be written.

    """
    files = {name: folder / name for name in _FILES[kind]}
    if _PACKAGES in files and files[_PACKAGES].is_file():
        del files[_PACKAGES]
    for path in files.values():
        if path.exists():
            raise ConfigError(f"{path}: exists already; move it away, or give another folder")
    texts = {path: text_of(name, kind, sizes, folder) for name, path in files.items()}
    commands = [line for text in texts.values() for line in re.findall("(?m)^#   (.*)", text)]
    return written(folder, texts, commands)


def written(folder: Path, texts: Mapping[Path, str], commands: Sequence[str]) -> str:
    """Write files of a project; return their names, and the commands to run next.

    Raises:
        ConfigError: one cannot be written.

    """
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error}") from error
    return "\n".join([*(f"wrote {path}" for path in texts), "next:", *commands])


def _configuration(folder: Path) -> str:
    """Return the name of the first configuration in a folder; a placeholder without one."""
    # editors keep links to nowhere next to a file
    for file in filter(Path.is_file, sorted(folder.glob("*.yaml"))):
        if re.search("(?m)^(experiment|function):", file.read_text(errors="replace")):
            return file.name
    return "CONFIG.yaml"
