"""The rules of the house that hold for every file."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
ENTRIES = {path.name for path in (PROJECT / "raypipe").iterdir()}
MODULES = sorted((PROJECT / "raypipe").rglob("*.py"))


#: packages and small modules from the top to the bottom; each imports only those after it
ORDER = (
    *("__main__", "cli", "api", "ui", "commands", "launch", "study", "functions", "scripts"),
    *("graph", "cards", "training", "report", "config", "store", "faults"),
    *("provenance", "stats", "hardware", "import_path", "process_tree", "redaction", "errors"),
)
#: what a phase of TELEClass may share with another one lies next to the phases
PHASES = {f"experiments.teleclass.{name}" for name in ("encode", "refine", "augment", "infer")}


@cache
def nodes(file: Path) -> list[ast.AST]:
    """The syntax tree of a module."""
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Every imported module, and of one that names are imported from, each of these."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where a name comes from"
            yield from ((str(node.module), alias.name) for alias in node.names)


def imports(file: Path) -> Iterator[str]:
    """Every imported module, also of imports inside functions and of those for types alone."""
    for module, name in imported(file):
        path = PROJECT.joinpath(*module.split("."), name)
        is_module = path.is_dir() or path.with_suffix(".py").is_file()
        yield f"{module}.{name}" if name and is_module else module


def test_a_package_imports_only_packages_below_it() -> None:
    found = {name.removesuffix(".py") for name in ENTRIES - {"__pycache__"}}
    assert sorted(found - {"__init__", "py.typed"}) == sorted(ORDER)
    assert len(found) <= 25
    upward = []
    for file in MODULES:
        own = file.relative_to(PROJECT / "raypipe").parts[0].removesuffix(".py")
        above = ORDER[: ORDER.index(own)] if own in ORDER else ()
        upward += [
            f"{file.relative_to(PROJECT)} imports {name}"
            for name in imports(file)
            if name.startswith("raypipe.") and name.split(".")[1] in above
        ]
    assert upward == []


def test_no_modules_import_each_other() -> None:
    """Imports for types alone count: who reads one of the modules has to read the others."""
    names = {
        ".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in MODULES
    }
    graph = {name: names.keys() & set(imports(file)) - {name} for name, file in names.items()}
    TopologicalSorter(graph).prepare()  # names a cycle


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("experiments", ()), ("ray", ("launch/",)),
     ("raypipe.cards", ("cards/", "commands/prediction.py"))],
)  # fmt: skip
def test_only_these_modules_import(package: str, allowed: tuple[str, ...]) -> None:
    users = {
        file.relative_to(PROJECT / "raypipe").as_posix()
        for file in MODULES
        if any(f"{name}.".startswith(f"{package}.") for name in imports(file))
    }
    assert {user for user in users if not user.startswith(allowed)} == set()
    assert all(any(user.startswith(part) for user in users) for part in allowed)


def test_no_phase_imports_another_phase() -> None:
    for name in PHASES:
        file = PROJECT.joinpath(*name.split(".")).with_suffix(".py")
        assert (PHASES - {name}) & set(imports(file)) == set(), name


def test_importing_the_api_changes_no_environment_variable() -> None:
    module = "raypipe.graph.launcher"
    code = f"import os; old = dict(os.environ); import {module}; assert dict(os.environ) == old"
    subprocess.run([sys.executable, "-c", code], check=True)


#: loading torch or ray takes seconds, scipy.stats half a second
HEAVY = ("torch", "ray", "pandas", "pyarrow", "matplotlib", "sklearn")
HELP = """import sys; sys.argv = ['raypipe', '--help']
from raypipe.cli import main
try: main()
except SystemExit as done: assert not done.code"""
TASKS = """import experiments.lm_pretrain.shards, experiments.summarization.tokenizer, pkgutil
from experiments.pabbo_lda import objective
for module in pkgutil.iter_modules(objective.__path__):
    __import__(f'{objective.__name__}.{module.name}')"""
#: loading torch takes seconds, matplotlib and optuna one; a single call draws nothing
MAP = """import pathlib, sys, raypipe as rp
pathlib.Path('called.py').write_text('def f(x): return dict(y=x)')
run = rp.map('called:f', {'x': [1]}, local=True)
rp.map('called:f', {'x': [1]}, run_dir=run.run_dir)  # nothing to do: without Ray
assert len(sys.modules) < 1300  # of which the standard library differs between versions
assert sum(name.startswith('raypipe') for name in sys.modules) <= 70"""


#: loading pandas takes a fifth of a second, which is a third of what listing 200 runs takes
VIEW = "from raypipe.commands.listing import view; view([{'run': 'a'}], 80)"


TRACKERS = """from raypipe.graph.tracking import _PACKAGES, check, file_of_module
from raypipe.store.run_directory import RunDirectory
check([n for n in _PACKAGES if all(map(file_of_module, _PACKAGES[n]))], RunDirectory.at('x'))"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import raypipe", HEAVY),
        (HELP, HEAVY),
        ("import raypipe.launch.mailbox, raypipe.launch.task", HEAVY),
        ("import raypipe.commands.run", ("scipy.stats", "pandas", "matplotlib")),
        (TASKS, ("torch", "ray", "transformers", "optuna", "matplotlib")),
        (MAP, ("torch", "ray", "optuna", "matplotlib")),
        (VIEW, ("torch", "ray", "pandas", "pyarrow.compute")),
        (TRACKERS, ("torch", "tensorboard", "mlflow", "wandb", "sqlalchemy")),
    ],
    ids=[
        "api",
        "help",
        "small processes",
        "commands",
        "CPU tasks of experiments",
        "map",
        "ls",
        "trackers",
    ],
)
def test_what_is_small_or_quick_loads_nothing_heavy(
    code: str, heavy: tuple[str, ...], tmp_path: Path
) -> None:
    shown = f"\nimport json, sys; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code + shown],
        cwd=tmp_path,
        env={**os.environ, "RAYPIPE_RUNS": str(tmp_path), "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_every_name_of_the_public_api_can_be_imported() -> None:
    import raypipe

    assert all(getattr(raypipe, name) is not None for name in raypipe.__all__)
    assert set(raypipe._MODULES) == set(raypipe.__all__)
    assert len(raypipe.__all__) <= 45


def test_experiments_import_public_names_alone() -> None:
    import raypipe

    public = {("raypipe", name) for name in raypipe.__all__}
    deeper = [
        f"{file}: {module} {name}"
        for file in sorted((PROJECT / "experiments").rglob("*.py"))
        for module, name in imported(file)
        if module.startswith("raypipe") and (module, name) not in public
    ]
    assert deeper == []


def test_a_class_name_exists_once() -> None:
    places: dict[str, list[str]] = {}
    for file in (*MODULES, *sorted((PROJECT / "experiments").rglob("*.py"))):
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                place = f"{file.relative_to(PROJECT)}:{node.lineno}"
                places.setdefault(node.name.lstrip("_"), []).append(place)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
