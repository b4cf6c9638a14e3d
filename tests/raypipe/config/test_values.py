"""Values as users write them, in files and on the command line: numbers, texts and mappings."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.commands import configuration as config
from raypipe.config.levels import parse_overrides
from tests.command import raypipe, table
from tests.raypipe.composed import HERE

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


def run(*words: str) -> str:
    return raypipe(*words, "--local")


def resolved(text: str, *overrides: str) -> Any:
    """The settings of a configuration with overrides."""
    return config.resolve(config.parse(text, "c.yaml"), overrides, "cpu", [HERE]).settings


def test_values_are_the_same_in_files_on_the_command_line_and_in_a_stored_configuration():
    listed = f"[{', '.join(VALUES)}]"
    Path("c.yaml").write_text(f"function: valued:kind\narguments:\n  x: {listed}\n")
    run("run", "c.yaml", "--run-dir", "file")
    expected = {repr(value) for value in VALUES.values()}
    assert set(table("file", "calls")["value"]) == expected
    words, stored = parse_overrides([f"x={listed}"]), config.read("file/config.yaml").values
    for given in (words["x"], stored["arguments"]["x"]):
        assert {repr(value) for value in given} == expected
    assert "nothing to do" in run("run", "c.yaml", "--run-dir", "file")
    of_yaml_11 = yaml.safe_load(Path("file/config.yaml").read_text())["arguments"]["x"]
    assert {repr(x) for x in of_yaml_11} == expected  # for readers other than raypipe


@pytest.mark.parametrize(("text", "hint"), CASES["hints"].items())
def test_a_text_that_is_probably_meant_otherwise_gets_one_line(caplog, text, hint):
    parse_overrides([f"arguments.x={text}"])
    Path("c.yaml").write_text(f"function: valued:kind\narguments:\n  x: {text}\n")
    config.read("c.yaml")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 * bool(hint)
    for line, place in zip(lines, ("command line: x", "c.yaml: line 3"), strict=False):
        assert line.startswith(f"{place}: {hint}")


def test_no_value_on_the_command_line_is_null_and_said_so(caplog):
    assert parse_overrides(["arguments.x="]) == {"arguments": {"x": None}}
    assert "x: no value is null; write \"x=''\" for an empty text" in caplog.text


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
    axes = resolved(SEARCH, *(f"matrix.{word}" for word in case["words"])).matrix.search.axes
    ends = {name.removeprefix("arguments."): list(axis.ends) for name, axis in axes.items()}
    assert ends == case["axes"]


MAPPING = "function: valued:kind\narguments: {x: [{a: 1, b: {c: 2}}], y: {d: 4}}\n"


@pytest.mark.parametrize("case", CASES["mappings"], ids=lambda case: str(case["words"]))
def test_a_mapping_is_merged_and_an_empty_one_drops_what_was_given(case):
    assert resolved(MAPPING, *case["words"]).arguments["y"] == case["value"]


def test_a_profile_empties_a_mapping_of_the_file_and_an_empty_section_changes_nothing():
    Path("c.yaml").write_text(
        MAPPING + "matrix: {runs: 1, arguments.y: [1]}\nprofiles: {cpu: {arguments: {y: {}}}}\n"
    )
    shown = run("run", "c.yaml", "matrix={}", "matrix.runs=null", "--run-dir", "r")
    assert "matrix: 1 points" in shown


def test_importing_raypipe_does_not_change_yaml_for_others():
    assert yaml.safe_load("2024-01-01") == date(2024, 1, 1)
