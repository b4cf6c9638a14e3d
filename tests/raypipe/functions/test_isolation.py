"""Calls apart from each other: time limits, processes they leave, what they raise and change."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from raypipe.launch.inline import InlineLauncher
from tests import command
from tests.command import table
from tests.scenario import Step, cases, play


@pytest.fixture
def notes(folder: Path) -> Path:
    """Where calls note their processes."""
    (folder / "notes").mkdir()
    return folder / "notes"


@pytest.fixture(params=["ray", "local"])
def place(request: pytest.FixtureRequest) -> Any:
    """A launcher; the cluster has to start before ``folder`` is the working directory."""
    return request.getfixturevalue("launcher") if request.param == "ray" else InlineLauncher()


CASES = [
    pytest.param(
        *(place, case["commands"]),
        id=f"{case['name']} ({place})",
        marks=[pytest.mark.slow] * (place in case.get("slow", ())),
    )
    for case in cases(__file__, "isolation")
    for place in case["places"]
]


@pytest.mark.parametrize(("place", "commands"), CASES, indirect=["place"])
def test_calls(place, folder, commands):
    def run(step: Step) -> command.Ended:
        return command.in_process(place, *step["words"].split(), environment={})

    play(commands, run)


def mapped(place: Any, function: str, *words: str) -> command.Ended:
    return command.in_process(place, "map", f"example_calls:{function}", *words, environment={})


def wait_for_the_end(folder: Path) -> None:
    """Wait until the processes that calls noted have ended, as they do after their worker."""
    pids = [int(path.name) for path in folder.iterdir()]
    command.until(lambda: not any(map(command.is_alive, pids)), "the processes end", 30)


@pytest.mark.parametrize("place", ["ray"], indirect=True)
def test_a_time_limit_ends_a_call_with_all_its_processes(place, notes):
    """Helpers have the connections of their worker, whose end would not be noticed."""
    before, kinds = datetime.now(UTC), "kind=[fork,session,orphan]"
    limits = ("--attempts", "1", "--time-limit", "2s", "--cpus", "0.5")
    ended = mapped(place, "hang", kinds, f"folder={notes}", *limits, "--run-dir", "r")
    assert ended.status == 1
    failures = table("r", "failures")
    assert sorted(failures["kind"]) == ["timeout"] * 3
    assert set(failures["message"]) == {"took longer than its limit of 2 s"}
    assert all(ended.output.count(unit) for unit in failures["unit"])
    assert len(list(notes.iterdir())) == 3
    wait_for_the_end(notes)
    (stage,) = table("r", "stages").to_dict("records")
    assert stage["duration_s"] >= 2
    assert before <= stage["started_at"]


@pytest.mark.slow
def test_processes_that_a_call_leaves_end_with_its_command(notes):
    """Also if the call's process ended without a word."""
    words = ("map", "example_calls:leave", "kind=[fork,session,orphan]", "end=[return,exit]")
    options = ("--attempts", "1", "--cpus", "0.5", "--run-dir", "r")
    paths = {"PYTHONPATH": str(command.EXAMPLES)}
    started = command.start(notes.parent, *words, f"folder={notes}", *options, environment=paths)
    command.finish(started, 1)
    assert len(table("r", "calls")) == 3
    assert len(list(notes.iterdir())) == 6
    wait_for_the_end(notes)


def test_a_call_changes_nothing_for_later_ones(place, notes):
    run = notes.parent / "r"
    ended = mapped(place, "change", "x=0..7", f"folder={notes}", "--run-dir", str(run))
    assert ended.status == 0, ended.output
    assert f"done: {run}" in ended.output
    calls = table("r", "calls")
    assert calls["worker"].nunique() < len(calls)
    names = ["directory", "mode", "home", "path", "arguments"]
    assert len(calls[names].drop_duplicates()) == 1
    assert not calls["path"].any()
    if not isinstance(place, InlineLauncher):
        for x in range(8):
            (log,) = run.glob(f"logs/calls-*x={x}*.log")
            assert f"call {x}" in log.read_text()
