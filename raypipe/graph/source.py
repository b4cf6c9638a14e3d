"""Source code of an experiment: its fingerprint, and the copies that a run directory keeps.

The source is the modules of the experiment's package, and what they import. Changed source does not
change identities, since most edits leave results as they are; a run that continues with other
source says so.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from raypipe.config.shipped import importable, logical_source
from raypipe.errors import ConfigError, named
from raypipe.graph.experiment import Stage, Units
from raypipe.graph.identity import fingerprint as hash_of
from raypipe.redaction import printable, source_without_secrets
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory

_MOST_NAMED = 5
#: bytes of a script's file that is kept
_LARGEST = 2 * 2**20
#: ends of the names of files that are source code
_ENDINGS = (".py", ".sh", ".yaml", ".yml", ".toml", ".r", ".R", ".jl", ".c", ".cpp", ".cu", ".h")


@dataclass(frozen=True)
class SourceCode:
    """The hash of each source module of an experiment, and the content of their files by path.

    ``scripts`` are the hashes of files that its stages start, by path.
    """

    modules: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)
    scripts: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The hash of all modules and scripts."""
        return hash_of({**self.modules, **self.scripts})

    def changes(self, earlier: Mapping[str, str]) -> list[str]:
        """Return the modules that were edited, added or removed since, sorted."""
        names = {*self.modules, *earlier}
        return sorted(name for name in names if self.modules.get(name) != earlier.get(name))


def source_of(module: str) -> SourceCode:
    """Return the source of an experiment's module: that of all its :func:`files_from`.

    It has none if the module cannot be found. A shipped experiment has the same source in the
    repository and in the wheel.
    """
    modules, files = dict[str, str](), dict[str, bytes]()
    spec = find_spec(importable(module))
    origin = spec.origin if spec is not None else None
    for name, path in files_from(Path(origin), module).items() if origin is not None else ():
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


@lru_cache(maxsize=1024)  # a notebook repeats it, and 46 modules take 0.14 s
def _imports(content: bytes) -> Sequence[str]:
    """Return the names that a module may import, each once."""
    found: list[str] = []
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return list(dict.fromkeys(found))


def _files(root: Path, module: str, own: str) -> list[Path]:
    """Return the files of a module below the root, unless it is installed or raypipe's."""
    top = module.partition(".")[0]
    if top == "raypipe" or top in sys.stdlib_module_names:
        return []
    if root.name in ("site-packages", "dist-packages") and top != own:
        return []
    base = root.joinpath(*module.split("."))
    return [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]


def with_scripts(source: SourceCode, stages: Sequence[Stage]) -> SourceCode:
    """Return the source of an experiment with the source files of scripts that its stages start."""
    listed = (stage.units for stage in stages if not isinstance(stage.units, Units))  # of calls
    units = (unit for of_stage in listed for unit in of_stage)
    several = (unit.literals.get("files") for unit in units)
    names = dict.fromkeys(name for names in several if isinstance(names, Mapping) for name in names)
    paths = {name.lstrip("/"): Path(name) for name in names if ".." not in Path(name).parts}
    scripts = {
        name: path.read_bytes()
        for name, path in paths.items()
        if path.suffix in _ENDINGS and path.is_file() and path.stat().st_size <= _LARGEST
    }
    hashes = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in scripts.items()}
    return SourceCode(source.modules, {**source.files, **scripts}, hashes)


def keep_code(code: SourceCode, ledger: Ledger, run_dir: RunDirectory) -> None:
    """Record the hashes of the modules, and keep the files, once for each state of them.

    Secrets are left out, and so are raypipe's own files.
    """
    if ledger.get("code", code.fingerprint) is not None:
        return
    texts = {
        name: source_without_secrets(content.decode(errors="replace"), python=name.endswith(".py"))
        for name, content in code.files.items()
        if not name.startswith("raypipe/")
    }
    run_dir.write(run_dir.code(code.fingerprint), json.dumps(texts).encode())
    ledger.put("code", {code.fingerprint: {"modules": dict(code.modules)}})


def code_text(run_dir: RunDirectory) -> str:
    """Return the code that computed what a run directory holds, for ``raypipe show --code``.

    The first version is shown whole, each later one by its differences to the one before it.

    Raises:
        ConfigError: none is kept, or a file of it is damaged.

    """
    ledger = Ledger.to_read(run_dir)
    units: dict[str, list[str]] = {}
    for key, row in ledger.items("units"):
        units.setdefault(row["code"], []).append(key)
    parts, earlier = list[str](), dict[str, str]()
    for fingerprint, _ in ledger.items("code"):
        ran, path = units.get(fingerprint, []), run_dir.code(fingerprint)
        first = f": {named(ran, _MOST_NAMED)}" if ran else ""
        parts.append(f"code {fingerprint[:12]}: {len(ran)} units{first}")
        try:
            files: dict[str, str] = json.loads(run_dir.read(path))
            parts += _shown(earlier, files)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: is missing or damaged ({error})") from error
        earlier = files
    if not parts:
        raise ConfigError(f"{run_dir.shown}: keeps no code: nothing of it was computed here")
    return printable("\n".join(parts), keep="\n\t")


def _shown(earlier: Mapping[str, str], files: Mapping[str, str]) -> Iterator[str]:
    """Yield the files; with earlier ones, the lines that differ from them."""
    for name, text in files.items() if not earlier else ():
        yield f"\n--- {name}\n{text}"
    for name in sorted({*earlier, *files}) if earlier else ():
        before, now = (each.get(name, "").splitlines() for each in (earlier, files))
        yield from difflib.unified_diff(before, now, f"before: {name}", name, lineterm="")
