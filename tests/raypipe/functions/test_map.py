"""Function experiments through the commands, in one process."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests import command

MODULE = """
def score(x, scale=1, seed=0):
    if x == 13:
        raise ValueError("thirteen")
    return {"loss": (x - 3) ** 2 * scale, "noisy": x + seed / 10, "name": f"n{x}"}
"""
FILE = """
function: {module}:score
arguments: {{x: 0..3, scale: [1, 2], seed: 0}}
cpus: 0.5
minimize: [loss]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    name = f"own{os.urandom(4).hex()}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "own.yaml").write_text(FILE.format(module=name))
    yield tmp_path
    sys.modules.pop(name, None)


@pytest.fixture
def name(folder) -> str:
    return next(path.stem for path in folder.glob("own*.py"))


def raypipe(*words: str) -> command.Ended:
    return command.in_process(InlineLauncher(), *words, environment={})


def calls() -> pd.DataFrame:
    return read_table(RunDirectory.at("r"), "calls")


def cases(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text())


@pytest.mark.parametrize("case", cases("commands"), ids=lambda case: case["name"])
def test_commands_on_functions(folder, name, case):
    module, before = folder / f"{name}.py", None

    def check(output: str, says: list[str] = (), lacks: list[str] = ()) -> None:
        shown = " ".join(output.split())
        assert [text for text in says if text.replace("{name}", name) not in shown] == []
        assert [text for text in lacks if text in shown] == []

    for step in case["commands"]:
        for file, text in step.get("files", {}).items():
            (folder / file).write_text(text.replace("{name}", name))
        if "code" in step or "replace" in step:
            old = step.get("code") or module.read_text()
            module.write_text(old.replace(*step.get("replace", ("", ""))))
            sys.modules.pop(name, None)
        words = step["words"].replace("{run}", "map {name}:score --run-dir r")
        ended = raypipe(*shlex.split(words.replace("{name}", name)))
        assert ended.status == step.get("status", 0), ended.output
        check(ended.output, step.get("says", ()), step.get("lacks", ()))
        if "page" in step:
            check(Path("r/report/index.html").read_text(), **step["page"])
        frame = calls() if Path("r/results/calls").exists() else pd.DataFrame({"call": []})
        if "calls" in step:
            frame = frame.sort_values("call")
        for column, values in (step.get("listed") or step.get("calls") or {}).items():
            assert [None if pd.isna(x) else x for x in frame[column]] == values
        assert list(frame.columns[3:10]) == step.get("columns", list(frame.columns[3:10]))
        frame = frame.set_index("call")
        if "kept" in step:
            columns = before.columns.intersection(frame.columns)  # without one asked for before
            after = frame.loc[before.index, columns]
            pd.testing.assert_frame_equal(after, before[columns], check_dtype=False)
        before = frame
        if "failures" in step:
            units = sorted(read_table(RunDirectory.at("r"), "failures")["unit"])
            assert units == step["failures"]


def test_a_damaged_line_of_the_ledger_costs_only_its_call(name):
    words = ("map", f"{name}:score", "x=[1,2]", "seed=0", "matrix.runs=2", "--run-dir", "r")
    assert raypipe(*words).status == 0
    before = calls()
    file = next(Path("r/ledger").iterdir())
    lines = file.read_bytes().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if b'"key": "calls/seed=0,x=2' in line)
    lines[place] = lines[place].replace(b'"line"', b'"lXne"')
    file.write_bytes(b"".join(lines))
    assert " damaged: line" in raypipe("show", "r").output
    expected = f"line {place + 1} of {file.name}; 1 of 4 units run again"
    planned = raypipe("plan", "r/config.yaml", "--run-dir", "r").output
    assert planned.count(expected) == 1
    ended = raypipe(*words)
    assert ended.status == 0, ended.output
    assert ended.output.count(expected) == 1
    after = calls()
    assert (before["duration_s"] != after["duration_s"]).sum() == 1
    pd.testing.assert_series_equal(before["loss"], after["loss"])
    assert "nothing to do" in raypipe(*words).output
    shown = raypipe("show", "r").output
    assert f"was damaged and repaired; ledger/{file.name}.damaged" in shown


def test_the_report_needs_no_function(folder, name, tmp_path_factory, monkeypatch):
    assert raypipe("run", "own.yaml", "--run-dir", "r").status == 0
    page = folder / "r" / "report" / "index.html"
    page.unlink()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    del sys.modules[name]
    assert raypipe("report", str(folder / "r")).status == 0
    assert "loss" in page.read_text()


@pytest.mark.parametrize("mistake", cases("mistakes"), ids=lambda each: each["problem"])
def test_a_mistake_is_one_message_and_leaves_nothing(folder, name, mistake):
    before = sorted(folder.rglob("*.yaml"))
    ended = raypipe("map", *(word.format(name=name) for word in mistake["words"]))
    assert ended.status == 2, ended.output
    assert mistake["problem"] in ended.output
    assert "Traceback" not in ended.output
    assert sorted(folder.rglob("*.yaml")) == before
    assert not (folder / "runs").exists()


def test_a_folder_of_something_else_is_no_run_directory(name):
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    for words in (("map", f"{name}:score", "x=1"), ("plan", "own.yaml")):
        ended = raypipe(*words, "--run-dir", "full")
        assert ended.status == 2
        assert "is not a run directory and has other files (notes.txt)" in ended.output
    assert [path.name for path in Path("full").iterdir()] == ["notes.txt"]
    Path("full/notes.txt").rename("full/own.yaml")
    Path("full/.hidden").touch()
    assert raypipe("map", f"{name}:score", "x=1", "--run-dir", "full").status == 0


def test_logs_have_the_names_of_calls(name):
    ended = raypipe("map", f"{name}:score", "x=1", "--run-dir", "r")
    assert "logs: " not in ended.output
    none = raypipe("logs", "r").output
    assert "r: has no logs: no unit printed anything or failed" in none
    assert "goes to logs/ in the run directory" in none
    run = RunDirectory.at("r")
    run.append(run.log("calls/x=1"), b"working on 1\n")
    ended = raypipe("map", f"{name}:score", "x=[1,2]", "--run-dir", "r")
    assert f"logs: raypipe logs {Path('r').resolve()}\ndone: " in ended.output
    assert raypipe("map", f"{name}:score", "x=[1,2,13]", "--run-dir", "r").status == 1
    listed = raypipe("logs", "r").output
    names = [line.split()[0] for line in listed.splitlines()[1:]]
    assert names == ["calls/x=1", "calls/x=13"]
    for unit in ("calls/x=1", "calls-x=1", "x=1"):
        assert raypipe("logs", "r", unit).output == "working on 1\n"
