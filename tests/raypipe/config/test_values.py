"""Values as users write them, in files and on the command line: numbers, texts and mappings."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import yaml

from raypipe.commands import configuration as config
from raypipe.config.validation import parse_overrides
from tests.command import raypipe, table
from tests.scenario import cases

MODULE = """
def kind(x):
    return {"value": repr(x)}
"""
CASES = cases(__file__, "values")


@pytest.fixture(autouse=True)
def _valued(folder: Path) -> None:
    (folder / "valued.py").write_text(MODULE)


def test_values_are_the_same_in_files_on_the_command_line_and_in_a_stored_configuration():
    listed = f"[{', '.join(CASES['read'])}]"
    Path("c.yaml").write_text(f"function: valued:kind\narguments:\n  x: {listed}\n")
    raypipe("run", "c.yaml", "--run-dir", "file")
    expected = set(CASES["read"].values())
    assert set(table("file", "calls")["value"]) == expected
    words, stored = parse_overrides([f"x={listed}"]), config.read("file/config.yaml").values
    for given in (words["x"], stored["arguments"]["x"]):
        assert {repr(value) for value in given} == expected
    assert "nothing to do" in raypipe("run", "c.yaml", "--run-dir", "file")
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


def test_importing_raypipe_does_not_change_yaml_for_others():
    assert yaml.safe_load("2024-01-01") == date(2024, 1, 1)
