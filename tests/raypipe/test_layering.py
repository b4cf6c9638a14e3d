"""The rules of the house that hold for every file."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
MODULES = sorted((PROJECT / "raypipe").rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """The top-level package of every import, also of those inside functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where a name comes from"
            yield str(node.module).partition(".")[0]


def test_raypipe_knows_no_experiment() -> None:
    assert len(MODULES) > 30
    assert [str(file) for file in MODULES if "experiments" in imports(file)] == []


def test_only_the_launchers_import_ray() -> None:
    users = {file for file in MODULES if "ray" in imports(file)}
    assert users
    assert {file.relative_to(PROJECT / "raypipe").parts[0] for file in users} == {"launch"}


@pytest.mark.parametrize("folder", ["raypipe", "experiments"])
def test_modules_can_be_read_in_a_sitting(folder: str) -> None:
    long = {
        str(file.relative_to(PROJECT)): lines
        for file in (PROJECT / folder).rglob("*.py")
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}


@pytest.mark.parametrize(
    "code",
    [
        "import raypipe",
        "import sys; sys.argv = ['raypipe', '--help']\n"
        "from raypipe.cli import main\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code",
        "import raypipe.launch.job_mailbox, raypipe.launch.task  # in processes that may need none",
    ],
)
def test_help_and_small_processes_are_quick(code: str) -> None:
    """Loading torch or ray takes seconds."""
    heavy = ["torch", "ray", "pandas", "pyarrow", "matplotlib", "sklearn"]
    shown = f"\nimport json, sys; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code + shown], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
