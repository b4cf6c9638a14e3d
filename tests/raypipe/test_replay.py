"""Stored units computed again, and the code that computed them, through the public commands."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pyarrow.fs as arrow_fs
import pytest

import raypipe as rp
from raypipe.commands import replay as command
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.source import SourceCode, with_scripts
from raypipe.provenance import environment_row
from raypipe.store.ledger import Ledger
from tests.command import finish, in_process, raypipe, start, until
from tests.raypipe.examples.hills import HILL, SEARCH
from tests.scenario import cases, content, edit, play

MODULE = """
import random

def helper(x):
    return (x - 3) ** 2

def score(x, seed=0):
    random.seed(seed)
    return {"loss": helper(x) + 1, "noise": random.random(), "name": f"n{x}"}
"""
CASES = {case["name"]: case["commands"] for case in cases(__file__, "replay")}
MAP = ("map", "mine:score", "--run-dir", "r", "--local")


@pytest.fixture(autouse=True)
def _mine(folder: Path) -> None:
    (folder / "mine.py").write_text(MODULE)


@pytest.mark.parametrize("name", CASES)
def test_what_a_replay_says(folder, name):
    (folder / "hill.py").write_text(HILL)
    (folder / "search.yaml").write_text(SEARCH.replace("trials: 12", "trials: 3"))
    play(CASES[name])


def test_what_is_not_recorded_is_said_to_decide(monkeypatch):
    edit("mine.py", "    random.seed(seed)\n", "")
    raypipe(*MAP, "x=0..2")
    recorded = "nothing that is recorded; does a seed decide all that is random?"
    assert f"changed since: {recorded}" in raypipe("replay", "r", expected=1)
    other = {**environment_row(), "numpy": "9.9"}
    monkeypatch.setattr(command, "environment_row", lambda: other)
    shown = raypipe("replay", "r", expected=1)
    (line,) = [line for line in shown.splitlines() if line.startswith("changed since")]
    assert line == f"changed since: numpy: {environment_row()['numpy']} -> 9.9"


def test_functions_of_notebooks_and_code_in_run_directories_are_refused():
    rp.map(lambda x: {"y": x}, {"x": [1, 2]}, run_dir="n", local=True)
    assert "only functions of modules can be replayed" in raypipe("replay", "n", expected=2)
    raypipe(*MAP, "x=0..2")
    Path("mine.py").rename("r/mine.py")
    os.chdir("r")
    assert "would be imported from the run directory" in raypipe("replay", ".", expected=2)


def test_the_code_is_kept_without_secrets(folder):
    secret = 'API_KEY = "KEY77"\nlogin(password="KEY78", url="s3://KEY79:KEY80@host/x")\n'
    source = f"from other import login\n{secret}{MODULE}"
    (folder / "other.py").write_text('def login(**_):\n    """Do nothing."""\n')
    (folder / "mine.py").write_text(source)
    raypipe(*MAP, "x=1")
    (path,) = Path("r/code").iterdir()
    kept = json.loads(path.read_text())
    assert sorted(kept) == ["mine.py", "other.py"]
    assert "API_KEY" in kept["mine.py"]
    assert all(f"KEY{number}" not in kept["mine.py"] for number in (77, 78, 79, 80))
    assert "1 equal" in raypipe("replay", "r")


def test_large_files_of_scripts_are_not_kept(folder):
    for name, size in (("small.toml", 2**21), ("large.toml", 2**21 + 1)):
        (folder / name).write_bytes(bytes(size))
    unit = Unit("train", literals={"files": {"small.toml": "", "large.toml": ""}})
    code = with_scripts(SourceCode({}), [Stage("train", lambda context: None, [unit])])
    assert [*code.files] == ["small.toml"]


def test_damaged_code_is_one_message():
    raypipe(*MAP, "x=1")
    (path,) = Path("r/code").iterdir()
    for damaged in (path.read_bytes()[:-30], b"[1]", b""):
        path.write_bytes(damaged)
        assert f"{path.name}: is missing or damaged (" in raypipe("show", "r", "--code", expected=2)


def test_a_run_on_object_storage_is_replayed(folder, remote, monkeypatch):
    raypipe(*MAP, "x=0..2")
    arrow_fs.copy_files(str(folder / "r"), str(folder / "remote"))
    monkeypatch.setattr(command, "opened", lambda _: remote)
    found = rp.replay("bucket://run")
    assert [each.outcome for each in found.units] == ["equal"] * 3, str(found)
    (fingerprint,) = (key for key, _ in Ledger(remote, writable=False).items("code"))
    assert json.loads(remote.read(remote.code(fingerprint))) == {"mine.py": MODULE}


@pytest.mark.slow
def test_a_script_that_ran_on_a_cluster_is_replayed_here(folder, launcher):
    (script, *_) = CASES["a script is equal, and one that was edited is not computed"]
    for name, text in script["files"].items():
        (folder / name).write_text(text)
    ended = in_process(launcher, "run", "c.yaml", "--run-dir", "r", environment={})
    assert ended.status == 0, ended.output
    assert raypipe("replay", "r").endswith("\n1 equal\n")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_replay_leaves_nothing(folder, number):
    raypipe(*MAP, "x=0..1")
    before = content("r")
    edit("mine.py", "random.seed(seed)", "open('began', 'w').close(); import time; time.sleep(60)")
    (folder / "tmp").mkdir()
    environment = {"TMPDIR": str(folder / "tmp"), "RAYPIPE_CACHE": str(folder / "cache")}
    with start(folder, "replay", "r", environment=environment) as process:
        until(Path("began").exists, "the replay computes", process=process)
        process.send_signal(number)
        output = finish(process, 130, 60)
    assert "Traceback" not in output
    assert list((folder / "tmp").iterdir()) == []
    assert content("r") == before
