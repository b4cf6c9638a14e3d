"""The text of the hill, and what tests of its studies look at."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from tests import command, scenario
from tests.command import raypipe

HILL = Path(__file__).with_name("example_hill.py").read_text()
SEARCH = """
experiment: hill
matrix:
  search:
    axes:
      fit.rate: {low: 0.5, high: 8, log: true}
      fit.layers: {low: 1, high: 6}
    metrics:
      - {metric: measures.value, where: {method: judge}}
    trials: 12
    concurrent: 3
"""


def run(*matrix: str, folder: str = "run", words: tuple[str, ...] = (), expected: int = 0) -> str:
    """Run `hill.yaml` with these keys of the matrix; return the output, of a refusal the errors."""
    keys = [word for key in matrix for word in ("--matrix", key)]
    return raypipe("run", "hill.yaml", *keys, *words, "--run-dir", folder, expected=expected)


def edit(old: str, new: str) -> None:
    """Change the text of the hill in this folder; the next command imports it anew."""
    scenario.edit("hill.py", old, new)


def ran() -> dict[str, int]:
    """Return how often each stage ran since the last call."""
    file = Path("ran.txt")
    names = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return {name: names.count(name) for name in dict.fromkeys(names)}


def table(name: str, folder: str = "run") -> pd.DataFrame:
    return command.table(folder, name).drop(columns=["run_id", "command_id"], errors="ignore")


def killed(act: Callable[[], object]) -> bool:
    """Run a function in a forked process; return whether SIGKILL ended it."""
    return command.in_child(act) == -signal.SIGKILL
