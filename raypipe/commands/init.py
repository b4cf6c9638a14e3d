"""``raypipe init``: write a small project of the user's own.

A template is a folder of ``templates/``, or one of the experiments that come with raypipe, whose
code is copied under the name of the user's package.
"""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raypipe.config import shipped
from raypipe.config.levels import near_and_all
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.graph.source import files_from

_TEMPLATES = Path(__file__).parent / "templates"
_WORKLOAD = _TEMPLATES / "workload"
_SMALL = ("function", "training")


def init(name: str | None, template: str) -> str:
    """Write a project; return what was written and the commands to run next.

    Raises:
        ConfigError: the template does not exist, or the folder is not a new or an empty one.

    """
    workloads = _workloads()
    if template not in (known := [*_SMALL, *workloads]):
        listed = near_and_all(template, known)
        raise ConfigError(f"--template {template}: no such template{listed}")
    folder = Path(name if name is not None else f"my_{template}")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty; give the name of a new folder")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: exists and is not a folder; give the name of a new folder")
    title = folder.resolve().name
    if template in workloads:
        files = dict(_of_workload(template, _package(title, name)))
    else:
        of_template = (f for f in sorted((_TEMPLATES / template).iterdir()) if f.is_file())
        files = {file.name: file.read_bytes() for file in of_template}
    readme = files["README.md"].decode().replace("{name}", title)
    files["README.md"] = readme.encode()
    try:
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error}") from error
    first = re.search(r"```bash\n(.*?)```", readme, re.DOTALL)  # the commands to run
    packages = sorted({f"  {path.partition('/')[0]}/" for path in files if "/" in path})
    written = [f"  {path}" for path in sorted(files) if "/" not in path]
    following = ["next:", f"cd {shlex.quote(str(folder))}", first[1].rstrip() if first else ""]
    return "\n".join([f"wrote {folder}/", *packages, *written, *following]).rstrip()


def listing() -> str:
    """Return a line per template: its name, and what it is."""
    readmes = {name: (_TEMPLATES / name / "README.md").read_text("utf-8") for name in _SMALL}
    lines = {name: text.split("\n\n")[1] for name, text in readmes.items()}
    configurations = shipped.configurations()
    lines |= {name: shipped.headline(configurations[name]) for name in _workloads()}
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {line}" for name, line in lines.items())


def _workloads() -> list[str]:
    """Return the shipped experiments in the order of ``workload/small.yaml``."""
    return [name for name in _small() if (shipped.folder() / "experiments" / name).is_dir()]


def _of_workload(workload: str, package: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files: the experiment's modules and what they import, YAML files, README, test.

    Files of weights in the folders of the modules are included.
    """
    root = shipped.folder() / "experiments"
    module = f"experiments.{workload}"

    def renamed(text: str) -> bytes:
        text = re.sub(rf"(?<![\w.]){re.escape(module)}\b", package, text)
        return re.sub(r"(?<![\w.])experiments(?=\.[a-z])", package, text).encode()

    modules = set(files_from(root / workload / "__init__.py", module).values())
    parents = {parent for file in modules for parent in file.relative_to(root).parents}
    modules |= {root / parent / "__init__.py" for parent in parents if parent.parts}
    weights = {found for file in modules for found in file.parent.rglob("*.safetensors")}
    for file in sorted(modules | weights):
        path = file.relative_to(root)
        own = path.relative_to(workload) if path.parts[0] == workload else path
        content = file.read_bytes()
        if file in modules:
            content = renamed(shipped.logical_source(content).decode())
        yield (Path(package) / own).as_posix(), content
    for name, file in shipped.configurations().items():
        text = file.read_text(encoding="utf-8")
        if re.search(rf"^experiment: {re.escape(module)}$", text, re.MULTILINE):
            yield f"{name}.yaml", renamed(text)
    first = _small()[workload]
    values = {
        "{package}": package,
        "{workload}": workload,
        "{config}": first["config"],
        "{small}": shlex.join(first["small"]),
    }
    for name in ("README.md", "test_project.py"):
        text = (_WORKLOAD / name).read_text(encoding="utf-8")
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        yield name, text.encode()


def _package(title: str, name: str | None) -> str:
    """Return the name of the user's package. Raises ConfigError."""
    package = re.sub(r"\W", "_", title, flags=re.ASCII)
    if not package.isidentifier() or keyword.iskeyword(package):
        raise ConfigError(f"{name}: {package} cannot name a Python package; give another name")
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        raise ConfigError(
            f"{name}: Python already has a module {package} ({spec.origin}), which the project's "
            "package would hide; give another name"
        )
    return package


def _small() -> dict[str, Any]:
    """Return by workload the configuration to run first, and overrides for a first look."""
    file = _WORKLOAD / "small.yaml"
    found: dict[str, Any] = load_yaml(file.read_text(encoding="utf-8"), str(file))
    return found
