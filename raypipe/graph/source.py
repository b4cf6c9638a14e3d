"""Fingerprint of an experiment's source code: the modules of its package, and what they import.

Changed source does not change identities, since most edits leave results as they are; a run that
continues with other source says so (``--strict-code`` refuses).
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from raypipe.config.shipped import importable, logical_source
from raypipe.graph.identity import fingerprint as hash_of


@dataclass(frozen=True)
class SourceCode:
    """The hash of each source module of an experiment, and the content of their files by path."""

    modules: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        """The hash of all modules."""
        return hash_of(dict(self.modules))

    def changes(self, earlier: Mapping[str, str]) -> list[str]:
        """Return the modules that were edited, added or removed since, sorted."""
        names = {*self.modules, *earlier}
        return sorted(name for name in names if self.modules.get(name) != earlier.get(name))


def source_of(module: str) -> SourceCode:
    """Return the source of an experiment's module: that of all its :func:`files_of`.

    A shipped experiment has the same source in the repository and in the wheel.
    """
    modules, files = dict[str, str](), dict[str, bytes]()
    for name, path in files_of(module).items():
        content = logical_source(path.read_bytes())
        modules[name] = hashlib.sha256(content).hexdigest()[:16]
        inside = "/__init__" if path.name == "__init__.py" else ""
        files[f"{name.replace('.', '/')}{inside}.py"] = content
    return SourceCode(modules, files)


#: hash of each module of experiments when this process imported it, and its spec if it was loaded
_imported: dict[str, tuple[str, object]] = {}


def current_source(module: str) -> SourceCode:
    """Return the source of an experiment's module, which this process then imports as it is.

    If a file changed since an earlier call, as in a notebook, all modules of the experiment are
    removed from ``sys.modules``. A module that the user has reloaded since stays.
    """
    found = source_of(module)
    specs: dict[str, object] = {
        name: getattr(sys.modules.get(importable(name)), "__spec__", None) for name in found.modules
    }

    def is_stale(name: str) -> bool:
        digest, spec = _imported.get(name, (found.modules[name], None))
        return digest != found.modules[name] and (spec is None or spec is specs[name])

    if any(map(is_stale, found.modules)):
        for name in found.modules:
            sys.modules.pop(importable(name), None)
        specs = {}
        invalidate_caches()
    _imported.update({name: (found.modules[name], specs.get(name)) for name in found.modules})
    return found


def files_of(module: str) -> dict[str, Path]:
    """Return the files of an experiment's module by the names of the modules.

    It has none if it cannot be found.
    """
    spec = find_spec(importable(module))
    return {} if spec is None or spec.origin is None else files_from(Path(spec.origin), module)


def files_from(file: Path, module: str) -> dict[str, Path]:
    """Return the files that a module in a file consists of, by the names of the modules.

    They are every module of its package, and the modules next to that package (of the same
    top-level package, or of the same directory for a single file) that these import. raypipe and
    installed packages are not part of it.
    """
    package = file.parent if file.name == "__init__.py" else None
    root = file.parents[module.count(".") + (package is not None)]
    pending = deque(sorted(package.rglob("*.py")) if package is not None else [file])
    found: dict[str, Path] = {}
    while pending:
        path = pending.popleft()
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if name in found or not path.is_file():
            continue
        found[name] = path
        for imported in _imports(logical_source(path.read_bytes())):
            pending += _files(root, imported, module.partition(".")[0])
    return found


def _imports(content: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(root: Path, module: str, own: str) -> list[Path]:
    """Return the files of a module below the root, unless it is installed or raypipe's."""
    top = module.partition(".")[0]
    if top == "raypipe" or top in sys.stdlib_module_names:
        return []
    if root.name in ("site-packages", "dist-packages") and top != own:
        return []
    base = root.joinpath(*module.split("."))
    return [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]
