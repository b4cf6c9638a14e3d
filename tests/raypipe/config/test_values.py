"""Values as users write them, in files and on the command line: numbers, texts and mappings."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import yaml

from tests.command import raypipe, table

MODULE = """
def kind(x, y=None):
    return {"value": repr(x), "other": repr(y)}

def loss(x, y=0.0):
    return {"loss": (x - 1) ** 2 + y}
"""
CASES = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text())
#: what is written in YAML, and the value that a function receives
VALUES = {
    **{text: text for text in ("1:2", "12:30:45", "010", "-01.5", "1_000", "2024-01-01", "08")},
    **{"0x10": 16, "0o17": 15, "+3": 3, "-7": -7, "0": 0, "123456789012345678": 123456789012345678},
    **{"1e-3": 1e-3, "1E5": 1e5, "1.e3": 1e3, ".5": 0.5, "-0.0": -0.0, "5e-324": 5e-324},
    **{".inf": float("inf"), "-.inf": -float("inf"), ".nan": float("nan")},
    **{"null": None, "true": True, "off": False, "y": "y", "None": "None", "'none'": "none"},
    **{"'2e-3'": "2e-3", "'.5'": ".5", "'0o7'": "0o7", "1e999x": "1e999x", "nan": "nan"},
}


@pytest.fixture(autouse=True)
def _valued(folder: Path) -> None:
    (folder / "valued.py").write_text(MODULE)


def run(*words: str, expected: int = 0) -> str:
    return raypipe(*words, "--local", expected=expected)


def received(run_dir: str) -> set[str]:
    return set(table(run_dir, "calls")["value"])


def test_values_are_the_same_in_files_on_the_command_line_and_in_a_stored_configuration():
    listed = f"[{', '.join(VALUES)}]"
    Path("c.yaml").write_text(f"function: valued:kind\narguments:\n  x: {listed}\n")
    run("run", "c.yaml", "--run-dir", "file")
    run("map", "valued:kind", f"x={listed}", "--run-dir", "words")
    run("run", "file/config.yaml", "--run-dir", "again")
    expected = {repr(value) for value in VALUES.values()}
    assert received("file") == received("words") == received("again") == expected
    assert "nothing to do" in run("run", "c.yaml", "--run-dir", "file")
    of_yaml_11 = yaml.safe_load(Path("file/config.yaml").read_text())["arguments"]["x"]
    assert {repr(x) for x in of_yaml_11} == expected  # for readers other than raypipe


def test_a_number_that_no_float_holds_is_refused():
    shown = run("map", "valued:kind", "x=12e4567", "--run-dir", "r", expected=2)
    assert "12e4567 exceeds the largest number; write quotes around a text" in shown
    assert not Path("r").exists()


@pytest.mark.parametrize(("text", "hint"), CASES["hints"].items())
def test_a_text_that_is_probably_meant_otherwise_gets_one_line(caplog, text, hint):
    run("map", "valued:kind", f"x={text}", "--run-dir", "r")
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    Path("c.yaml").write_text(f"function: valued:kind\narguments:\n  x: {text}\n")
    run("run", "c.yaml", "--run-dir", "r")
    in_file = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(in_file) == bool(hint)
    if hint:
        assert lines[0].startswith(f"command line: x: {hint}")
        assert in_file[0].startswith(f"c.yaml: line 3: {hint}")


def test_no_value_on_the_command_line_is_null_and_said_so(caplog):
    run("map", "valued:kind", "x=", "--run-dir", "r")
    assert received("r") == {"None"}
    assert "x: no value is null; write \"x=''\" for an empty text" in caplog.text


@pytest.mark.parametrize("text", ["issue #5", "#5", "[a, b] # c", "- #a"])
def test_a_comment_on_the_command_line_is_refused(text):
    shown = run("map", "valued:kind", f"x={text}", "--run-dir", "r", expected=2)
    assert f"command line: arguments.x={text}: a # begins a comment in YAML" in shown
    assert not Path("r").exists()


@pytest.mark.parametrize("text", ["'issue #5'", '"#5"', "a#5", "['#', b]"])
def test_a_number_sign_in_a_text_stays(text):
    run("map", "valued:kind", f"x={text}", "--run-dir", "r")
    assert any("#" in each for each in received("r"))


SEARCH = """
function: valued:loss
arguments: {x: 0.0}
matrix:
  search:
    axes: {arguments.x: {low: 0.0, high: 2.0}, arguments.y: {low: 0.0, high: 3.0}}
    metrics: [{metric: calls.loss, mode: min}]
    trials: 2
"""


@pytest.mark.parametrize("case", CASES["axes"], ids=lambda case: str(case["words"]))
def test_axes_of_the_command_line_are_merged_with_those_of_the_file(case):
    Path("c.yaml").write_text(SEARCH)
    given = [word for text in case["words"] for word in ("--matrix", text)]
    run("run", "c.yaml", *given, "--run-dir", "r")
    points = [json.loads(p) for p in table("r", "search")["point"]]
    for point in points:
        assert {key.removeprefix("arguments.") for key in point} == set(case["axes"])
        for name, (low, high) in case["axes"].items():
            assert low <= point[f"arguments.{name}"] <= high


MAPPING = "function: valued:kind\narguments: {x: [{a: 1, b: {c: 2}}], y: {d: 4}}\n"


@pytest.mark.parametrize("case", CASES["mappings"], ids=lambda case: str(case["words"]))
def test_a_mapping_is_merged_and_an_empty_one_drops_what_was_given(case):
    Path("c.yaml").write_text(MAPPING)
    run("run", "c.yaml", *case["words"], "--run-dir", "r")
    assert set(table("r", "calls")["other"]) == {repr(case["value"])}


def test_a_profile_empties_a_mapping_of_the_file_and_an_empty_section_changes_nothing():
    Path("c.yaml").write_text(
        MAPPING + "matrix: {runs: 1, arguments.y: [1]}\nprofiles: {cpu: {arguments: {y: {}}}}\n"
    )
    shown = run("run", "c.yaml", "matrix={}", "matrix.runs=null", "--run-dir", "r")
    assert "matrix: 1 points" in shown


def test_importing_raypipe_does_not_change_yaml_for_others():
    assert yaml.safe_load("2024-01-01") == date(2024, 1, 1)
