"""Function experiments through the commands, in one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import RunStatus
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


def calls(run_dir: str = "r") -> pd.DataFrame:
    frame = read_table(RunDirectory.at(run_dir), "calls")
    return frame.sort_values("call", ignore_index=True)


def test_each_combination_is_a_row(name):
    ended = raypipe("map", f"{name}:score", "x=0..3", "scale=[1,2]", "--run-dir", "r")
    assert ended.status == 0, ended.output
    frame = calls()
    own = {}
    exec(MODULE, own)
    expected = [own["score"](x, scale) for x in range(4) for scale in (1, 2)]
    assert len(frame) == 8
    found = frame.sort_values(["x", "scale"])[["loss", "noisy", "name"]].to_dict("records")
    assert found == expected
    columns = ["call", "x", "scale", "loss", "noisy", "name", "duration_s"]
    assert list(frame.columns[3:10]) == columns


def test_a_file_and_the_command_line_name_the_same_calls(name):
    assert raypipe("run", "own.yaml", "--run-dir", "r").status == 0
    again = raypipe(
        "map", f"{name}:score", "x=0..3", "scale=[1,2]", "seed=0", "--cpus", "0.5",
        "--minimize", "loss", "--run-dir", "r",
    )  # fmt: skip
    assert "nothing to do" in again.output


def test_further_values_are_added_and_stored_calls_are_not_repeated(folder, name):
    assert raypipe("map", f"{name}:score", "x=[1,2]", "--run-dir", "r").status == 0
    before = calls().set_index("call")
    ended = raypipe("map", f"{name}:score", "x=[1,2,5]", "scale=[1]", "--run-dir", "r")
    assert ended.status == 0, ended.output
    assert len(calls()) == 5  # a call with `scale` is another call than one with its default
    ended = raypipe("map", f"{name}:score", "x=[1,2,5]", "--run-dir", "r")
    assert "(1 of 3 to do, the others are stored)" in ended.output
    after = calls().set_index("call")
    pd.testing.assert_frame_equal(after.loc[before.index, before.columns], before)


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


def test_a_failed_call_loses_no_other_and_runs_again_once_it_is_corrected(folder, name):
    ended = raypipe("map", f"{name}:score", "x=[1,13,2]", "--run-dir", "r")
    assert ended.status == 1
    assert "ValueError: thirteen" in ended.output
    assert f"raypipe map {name}:score 'x=[1,13,2]' --run-dir" in ended.output
    assert list(calls()["x"]) == [1, 2]
    failures = read_table(RunDirectory.at("r"), "failures")
    assert list(failures["unit"]) == ["calls/x=13"]

    (folder / f"{name}.py").write_text(MODULE.replace("x == 13", "False"))
    del sys.modules[name]
    assert "once the code is edited, add version=1" in ended.output
    refused = raypipe("map", f"{name}:score", "x=[1,13,2]", "--run-dir", "r")
    assert refused.status == 2
    assert f"the code changed since results were stored: {name}" in refused.output
    assert "add version=1 to keep what is stored" in refused.output
    stored = calls().set_index("x")
    ended = raypipe("map", f"{name}:score", "x=[1,13,2]", "version=1", "--run-dir", "r")
    assert ended.status == 0, ended.output
    assert list(calls()["x"]) == [1, 13, 2]
    shown = raypipe("show", "r").output
    assert "failure" not in shown
    assert "1 failed attempt of units that succeeded later" in shown
    assert (calls().set_index("x").loc[[1, 2], "duration_s"] == stored["duration_s"]).all()


def test_calls_that_failed_and_are_not_asked_for_are_no_failure_of_the_run(name):
    assert raypipe("map", f"{name}:score", "x=[1,13]", "--run-dir", "r").status == 1
    assert raypipe("map", f"{name}:score", "x=[1]", "--run-dir", "r").status == 0
    page = Path("r/report/index.html").read_text()
    assert "ValueError: thirteen" not in page
    assert "The table failures has 1 more" in page
    status = RunStatus.parse(Path("r/status.json").read_bytes())
    assert status.status == "succeeded"


def test_a_call_without_the_value_fails_alone_where_others_return_it(folder, name):
    text = "def score(x):\n    return {'loss': x} if x != 2 else {'other': 1}\n"
    (folder / f"{name}.py").write_text(text)
    words = ("map", f"{name}:score", "x=1..4", "--minimize", "loss", "--run-dir", "r")
    ran = raypipe(*words)
    assert ran.status == 1
    assert "calls/x=2: attempt 1: invalid_value: the function returned no 'loss'" in ran.output
    assert "result: loss 1 (x=1)" in ran.output
    assert sorted(calls("r")["x"]) == [1, 3, 4]
    assert "recovered" not in raypipe("show", "r").output


def test_a_value_that_stored_calls_did_not_return_is_refused(folder, name):
    """With the message of a call that ran."""
    problem = (
        "the function returned no 'los', but `maximize` or `minimize` names it: return a number"
    )
    words = ("map", f"{name}:score", "x=[1,2]", "--maximize", "los", "--run-dir")
    ran = raypipe(*words, "fresh")
    assert ran.status == 1
    assert f"calls/x=1: invalid_value: {problem} (returned: loss, noisy, name)" in ran.output
    assert len(calls("fresh")) >= 1  # what was returned is kept
    assert raypipe("map", f"{name}:score", "x=[1,2]", "--run-dir", "r").status == 0
    again = raypipe(*words[:3], "--maximize", "loss", "--run-dir", "fresh")
    assert again.status == 0
    assert "result: loss 4 (x=1)" in again.output
    stored = raypipe(*words, "r")
    assert stored.status == 2
    assert f"calls/x=1: {problem} (returned: loss, noisy, name); did you mean" in stored.output


def test_a_result_that_is_never_a_number_is_said(folder, name):
    (folder / f"{name}.py").write_text("def score(x):\n    return {'loss': float('nan')}\n")
    ended = raypipe("map", f"{name}:score", "x=[1,2]", "--minimize", "loss", "--run-dir", "r")
    assert ended.status == 0
    assert "WARNING: calls.loss is not finite in any of 2 rows: NaN at x=1 and x=2." in ended.output


def test_a_direction_that_is_given_later_is_shown(name):
    """Although all calls are stored; repetitions are averaged over."""
    words = ("map", f"{name}:score", "x=[1,2]", "seed=[0,1,2]", "--run-dir", "r")
    assert raypipe(*words).status == 0
    assert "result" not in raypipe("show", "r").output
    for direction, best in (("--minimize", "1 (x=2"), ("--maximize", "4 (x=1")):
        assert raypipe(*words, direction, "loss").status == 0
        shown = raypipe("show", "r").output
        assert f"is better): {best}, mean of 3)" in shown, shown
    assert "nothing to do" in raypipe(*words, "--maximize", "loss").output
    assert len(calls()) == 6


def test_calls_are_listed_in_the_order_of_their_arguments(folder, name):
    """As the last command gave them, followed by the other calls; not as they ended."""
    assert raypipe("map", f"{name}:score", "x=[9,2]", "--run-dir", "r").status == 0
    ended = raypipe("map", f"{name}:score", "x=[3,2,1]", "scale=[2,1]", "--run-dir", "r")
    assert ended.status == 0, ended.output
    ended = raypipe("map", f"{name}:score", "x=[3,10,1]", "scale=[2,1]", "--run-dir", "r")
    assert ended.status == 0, ended.output
    frame = read_table(RunDirectory.at("r"), "calls")
    assert frame["x"].tolist() == [3, 3, 10, 10, 1, 1, 2, 2, 9, 2]
    assert frame["scale"].tolist()[:8] == [2, 1] * 4


def test_the_report_needs_no_function(folder, name, tmp_path_factory, monkeypatch):
    assert raypipe("run", "own.yaml", "--run-dir", "r").status == 0
    page = folder / "r" / "report" / "index.html"
    page.unlink()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    del sys.modules[name]
    assert raypipe("report", str(folder / "r")).status == 0
    assert "loss" in page.read_text()


def test_runs_of_the_matrix_change_the_seed(name):
    ended = raypipe("map", f"{name}:score", "x=[1,2]", "seed=0", "matrix.runs=2", "--run-dir", "r")
    assert ended.status == 0, ended.output
    assert sorted(calls()["seed"]) == [0, 0, 1000, 1000]


MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each["problem"])
def test_a_mistake_is_one_message_and_leaves_nothing(folder, name, mistake):
    before = sorted(folder.rglob("*.yaml"))
    ended = raypipe("map", *(word.format(name=name) for word in mistake["words"]))
    assert ended.status == 2, ended.output
    assert mistake["problem"] in ended.output
    assert "Traceback" not in ended.output
    assert sorted(folder.rglob("*.yaml")) == before
    assert not (folder / "runs").exists()


def test_a_file_names_an_experiment_or_a_function(folder, name):
    own = f"function: {name}:score\n"
    for text, problem in (
        (f"{own}experiment: x\n", "give one of the two"),
        ("arguments: {x: 1}\n", "`function: MODULE:FUNCTION`"),
        (f"funtion: {name}:score\narguments: {{x: 1}}\n", "did you mean function?"),
        (f"{own}arguments: [1, 2]\n", "arguments = [1, 2]: "),
    ):
        (folder / "other.yaml").write_text(text)
        assert problem in raypipe("run", "other.yaml").output
    ended = raypipe("run", f"{name}.py")  # Python code
    assert ended.status == 2
    assert f"`raypipe map {name}:FUNCTION`" in ended.output


def test_arguments_of_a_file_are_overridden_by_their_names(name):
    directions = ("minimize=[]", "maximize=loss")
    ended = raypipe("run", "own.yaml", "x=[1]", "scale=3", "cpus=1", *directions, "--run-dir", "r")
    assert ended.status == 0, ended.output
    assert calls()[["x", "scale", "seed", "loss"]].values.tolist() == [[1, 3, 0, 12]]
    refused = raypipe("run", "own.yaml", "scal=3")
    assert "no argument 'scal'; did you mean scale?" in refused.output


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


SURROGATES = """
def score(x, name="a"):
    if x == 1:
        return {"got\\udcff": name}
    if x == 2:
        raise ValueError("cannot open " + name)
    return {"got": name, "size": len(name)}
"""


def test_texts_that_utf_8_cannot_encode_break_no_table(folder, name):
    """As the names of files that are not UTF-8: arguments, results, columns and messages."""
    (folder / f"{name}.py").write_text(SURROGATES)
    given = ('name="\\uDCFF"', "--run-dir", "r")
    ended = raypipe("map", f"{name}:score", "x=0..2", *given)
    assert ended.status == 1, ended.output
    assert r"invalid_value: the function returned the key 'got\udcff'" in ended.output
    assert r"ValueError: cannot open \udcff" in ended.output
    assert calls()[["name", "got", "size"]].values.tolist() == [[r"\udcff", r"\udcff", 1]]
    failures = read_table(RunDirectory.at("r"), "failures")
    assert r"ValueError: cannot open \udcff" in set(failures["message"])
    for view in ("show", "results", "report", "logs"):
        assert raypipe(view, "r").status == 0
    again = raypipe("map", f"{name}:score", "x=[0,3]", *given)
    assert again.status == 0, again.output
    assert calls()["x"].tolist() == [0, 3]


def test_a_number_of_more_than_64_bits_breaks_no_table(folder, name):
    (folder / f"{name}.py").write_text("def score(x):\n    return {'even': x % 2 == 0}\n")
    ended = raypipe("map", f"{name}:score", f"x=[{2**64}, 1]", "--run-dir", "r")
    assert ended.status == 0, ended.output
    assert set(calls()["x"]) == {str(2**64), "1"}
