"""Function experiments through the commands, in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.command import forget, raypipe, table
from tests.scenario import named_cases, play

MODULE = """
def score(x, scale=1, seed=0):
    if x == 13:
        raise ValueError("thirteen")
    return {"loss": (x - 3) ** 2 * scale, "noisy": x + seed / 10, "name": f"n{x}"}
"""


@pytest.fixture(autouse=True)
def _own(folder: Path) -> None:
    (folder / "own.py").write_text(MODULE)
    (folder / "own.yaml").write_text(Path(__file__).with_name("own.yaml").read_text())


@pytest.mark.parametrize("case", named_cases(__file__, "commands"))
def test_commands_on_functions(folder, case):
    play(case["commands"], here=str(folder))


def test_a_damaged_line_of_the_ledger_costs_only_its_calls():
    words = ("map", "own:score", "x=[1,2]", "seed=0", "matrix.runs=2", "--run-dir", "r")
    raypipe(*words)
    before = table("r", "calls")
    file = next(Path("r/ledger").iterdir())
    lines = file.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if b'"calls/seed=0,x=2' in line)
    number = len(json.loads(lines[place])["keys"])
    lines[place] = lines[place].replace(b'"line"', b'"lXne"')
    file.write_bytes(b"".join(lines))
    assert " damaged: line" in raypipe("show", "r")
    expected = f"line {place + 1} of {file.name}; {number} of 4 units run again"
    planned = raypipe("plan", "r/config.yaml", "--run-dir", "r")
    assert planned.count(expected) == 1
    assert raypipe(*words).count(expected) == 1
    after = table("r", "calls")
    assert (before["duration_s"] != after["duration_s"]).sum() == number
    pd.testing.assert_series_equal(before["loss"], after["loss"])
    assert "nothing to do" in raypipe(*words)
    shown = raypipe("show", "r")
    assert f"was damaged and repaired; ledger/{file.name}.damaged" in shown


@pytest.mark.usefixtures("report")
def test_the_report_needs_no_function(folder, tmp_path_factory, monkeypatch):
    raypipe("run", "own.yaml", "--run-dir", "r")
    page = folder / "r" / "report" / "index.html"
    page.unlink()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    forget(folder)
    raypipe("report", str(folder / "r"))
    assert "loss" in page.read_text()
