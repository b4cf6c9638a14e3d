"""Files that calls of a function write, through the commands and in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import raypipe as rp
from raypipe.store.call_files import files_of, missing
from raypipe.store.run_directory import RunDirectory
from tests.command import raypipe
from tests.scenario import named_cases, play

MODULE = """
import os
from concurrent.futures import ThreadPoolExecutor

import raypipe as rp

SVG = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'

def draw(x, seed=0):
    folder = rp.output_dir()
    (folder / "plot.svg").write_text(SVG)
    if x == 13:
        raise ValueError("thirteen")
    (folder / "data").mkdir()
    (rp.output_dir() / "data" / "note.txt").write_text(f"note of {x}")
    return {"y": x} if x else {"z": x}

def leave(kind):
    if kind == "thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(rp.output_dir).result()
    os.mkfifo(rp.output_dir() / "pipe")
    return {"y": 1}
"""


@pytest.fixture(autouse=True)
def _own(folder: Path) -> None:
    (folder / "own.py").write_text(MODULE)


@pytest.mark.parametrize("case", named_cases(__file__, "files"))
def test_calls_that_write_files(case):
    play(case["commands"])


def test_files_are_found_by_call_and_name():
    raypipe("map", "own:draw", "x=[2,1,10]", "--run-dir", "r")
    run = rp.open("r")
    found = [(file.call, file.name) for file in run.files(call="x=1*")]
    assert found == [(f"x={x}", name) for x in (1, 10) for name in ("data/note.txt", "plot.svg")]
    (note,) = run.files("*.txt", "x=2")
    with note.open() as stream:
        assert stream.read() == Path(note.path).read_bytes() == b"note of 2"
    assert run.files("no*") == []


@pytest.mark.usefixtures("report")
def test_the_page_follows_no_link_and_refuses_other_names(folder):
    raypipe("map", "own:draw", "x=1", "--run-dir", "r")
    (folder / "secret.svg").write_text("<svg>secret</svg>")
    plot = folder / "r/files/calls/x=1/plot.svg"
    plot.unlink()
    plot.symlink_to(folder / "secret.svg")
    raypipe("report", "r")
    page = (folder / "r/report/index.html").read_text()
    assert "<img" not in page
    assert "plot.svg" in page
    rows = rp.open("r").table("calls").assign(files='["../../../../secret.svg"]')
    with pytest.raises(rp.ConfigError, match="cannot be a path in a run directory"):
        files_of(RunDirectory.at("r"), rows)
    with pytest.raises(rp.ConfigError, match=r"calls.files is damaged at x=1"):
        files_of(RunDirectory.at("r"), rows.assign(files="plot.svg"))


def test_files_on_another_disk_than_the_run_are_a_failure_of_their_call(folder):
    (folder / "r/files/calls/x=1").mkdir(parents=True)
    problems = missing(RunDirectory.at("r"), [f"calls/x={x}" for x in (1, 2)])
    assert list(problems) == ["calls/x=2"]
    assert "use one on storage that all nodes share, or a URI" in problems["calls/x=2"]
