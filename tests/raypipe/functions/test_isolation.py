"""Calls apart from each other: time limits, processes they leave, what they raise and change."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests import command

#: seconds in which processes end after their worker
_END_S = 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "processes"
    folder.mkdir()
    return folder


@pytest.fixture(params=["ray", "local"])
def place(request: pytest.FixtureRequest) -> Any:
    if request.param == "ray":
        return request.getfixturevalue("launcher")
    return InlineLauncher()


def mapped(place: Any, function: str, *words: str) -> command.Ended:
    return command.in_process(place, "map", f"example_calls:{function}", *words, environment={})


def table(run: Path, name: str) -> pd.DataFrame:
    return read_table(RunDirectory.at(run), name)


def survivors(folder: Path) -> list[str]:
    """The processes that calls noted and that do not end."""
    end = time.monotonic() + _END_S
    while alive := [path.name for path in folder.iterdir() if is_alive(int(path.name))]:
        if time.monotonic() > end:
            return alive
        time.sleep(0.05)
    return []


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_time_limit_ends_a_call_with_all_its_processes(place, folder, tmp_path):
    """Helpers have the connections of their worker, whose end would not be noticed."""
    run, before = tmp_path / "r", datetime.now(UTC)
    kinds = "kind=[fork,session,orphan]"
    limits = ("--attempts", "1", "--time-limit", "2s", "--cpus", "0.5")
    ended = mapped(place, "hang", kinds, f"folder={folder}", *limits, "--run-dir", str(run))
    assert ended.status == 1
    failures = table(run, "failures")
    assert sorted(failures["kind"]) == ["timeout"] * 3
    assert set(failures["message"]) == {"took longer than its limit of 2 s"}
    assert all(ended.output.count(unit) for unit in failures["unit"])
    assert len(list(folder.iterdir())) == 3
    assert survivors(folder) == []
    (stage,) = table(run, "stages").to_dict("records")
    assert stage["duration_s"] >= 2
    assert before <= stage["started_at"]


def test_processes_that_a_call_leaves_end_with_a_local_command(folder, tmp_path):
    words = ("kind=[fork,session,orphan]", f"folder={folder}", "--run-dir", str(tmp_path / "r"))
    ended = mapped(InlineLauncher(), "leave", *words)
    assert ended.status == 0, ended.output
    assert len(list(folder.iterdir())) == 3
    assert survivors(folder) == []


def test_processes_that_a_call_leaves_end_with_its_command(folder, tmp_path):
    """Also if the call's process ended without a word."""
    words = ("map", "example_calls:leave", "kind=[fork,session,orphan]", "end=[return,exit]")
    options = ("--attempts", "1", "--cpus", "0.5", "--run-dir", "r")
    paths = {"PYTHONPATH": str(command.EXAMPLES)}
    started = command.start(tmp_path, *words, f"folder={folder}", *options, environment=paths)
    output, _ = started.communicate(timeout=300)
    assert started.returncode == 1, output
    assert len(table(tmp_path / "r", "calls")) == 3
    assert len(list(folder.iterdir())) == 6
    assert survivors(folder) == []


def test_calls_may_have_pools(place, tmp_path):
    kinds = "kind=[fork,spawn,executor,joblib]"
    words = (kinds, "--time-limit", "5m", "--cpus", "0.5", "--run-dir", str(tmp_path / "r"))
    ended = mapped(place, "pools", *words)
    assert ended.status == 0, ended.output
    assert table(tmp_path / "r", "calls")["y"].tolist() == [3] * 4


def test_what_a_call_forks_ends_at_sigterm(place, tmp_path):
    ended = mapped(place, "forks", "x=20", "--run-dir", str(tmp_path / "r"))
    assert ended.status == 0, ended.output
    assert table(tmp_path / "r", "calls")["y"].tolist() == [20]


def test_a_call_changes_nothing_for_later_ones(place, tmp_path):
    run, elsewhere = tmp_path / "r", tmp_path / "elsewhere"
    elsewhere.mkdir()
    ended = mapped(place, "change", "x=0..7", f"folder={elsewhere}", "--run-dir", str(run))
    assert ended.status == 0, ended.output
    assert f"done: {run}" in ended.output
    calls = table(run, "calls")
    assert calls["worker"].nunique() < len(calls)
    names = ["directory", "mode", "home", "path", "arguments", "handler"]
    assert len(calls[names].drop_duplicates()) == 1
    assert not calls["path"].any()
    if not isinstance(place, InlineLauncher):
        for x in range(8):
            assert f"call {x}" in ended_log(run, x)


def ended_log(run: Path, x: int) -> str:
    return next(run.glob(f"logs/calls-*x={x}*.log")).read_text()


def test_what_a_call_raises_is_its_own_error(place, tmp_path):
    run = tmp_path / "r"
    ended = mapped(place, "fail", "kind=[keyboard,base,fine]", "--run-dir", str(run))
    assert ended.status == 1, ended.output
    failures = table(run, "failures").set_index("unit")
    assert dict(failures["message"]) == {
        "calls/kind=keyboard": "KeyboardInterrupt",
        "calls/kind=base": "GeneratorExit: not an Exception",
    }
    assert set(failures["outcome"]) == {"gave up"}
    assert all("in fail" in frame for frame in failures["frame"])
    assert table(run, "calls")["kind"].tolist() == ["fine"]


def test_ctrl_c_in_a_local_call_ends_the_run(tmp_path):
    run = tmp_path / "r"
    ended = mapped(InlineLauncher(), "fail", "kind=[fine,interrupt,late]", "--run-dir", str(run))
    assert ended.status == 130, ended.output
    assert "Continue with:" in ended.output
    assert table(run, "calls")["kind"].tolist() == ["fine"]


def test_each_unit_that_gave_up_is_named_with_its_error(launcher, tmp_path):
    kinds, run = "kind=[exit1,exit2,crash]", tmp_path / "r"
    ended = mapped(launcher, "fail", kinds, "--attempts", "1", "--run-dir", str(run))
    assert ended.status == 1, ended.output
    for name in ("exit1", "exit2", "crash"):
        assert f"calls/kind={name}" in ended.output.partition("\nfailed: ")[0]
    assert "worker_died: the worker process died: Fatal Python error: Segm" in ended.output
    assert "worker_died 1 more time(s): calls/kind=exit" in ended.output


@pytest.mark.parametrize("kind", ["long", "wide"])
def test_a_long_message_does_not_fill_the_screen(kind, tmp_path):
    run = tmp_path / "r"
    ended = mapped(InlineLauncher(), "fail", f"kind=[{kind},fine]", "--run-dir", str(run))
    assert ended.status == 1
    assert len(ended.output) < 2500
    assert ended.output.count("\n") < 20
    assert "(cut; its log has the whole message)" in ended.output
    text = {"long": "line 199 of", "wide": "wide " * 1400}[kind]
    assert text in next(run.glob("logs/*.log")).read_text()
