"""Stored units computed again, and the code that computed them, through the public commands."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pyarrow.fs as arrow_fs
import pytest

import raypipe as rp
from raypipe.commands import replay as command
from raypipe.graph.source import kept_code
from raypipe.provenance import environment_row
from raypipe.store.ledger import Ledger
from tests.command import in_process, raypipe, start, until
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
    shown = raypipe("replay", "r", expected=1)
    assert (
        "changed since: nothing that is recorded; does a seed decide all that is random?" in shown
    )
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


def test_the_code_is_kept_without_secrets_and_in_bounds(folder):
    secret = 'API_KEY = "KEY77"\nlogin(password="KEY78", url="s3://KEY79:KEY80@host/x")\n'
    source = f"from other import login\nimport big\n{secret}{MODULE}"
    (folder / "other.py").write_text('def login(**_):\n    """Do nothing."""\n')
    noise = "".join(os.urandom(1000).hex() for _ in range(2500))
    (folder / "big.py").write_text(f'DATA = "{noise}"\n')
    (folder / "mine.py").write_text(source)
    raypipe(*MAP, "x=1")
    (path,) = Path("r/code").iterdir()
    assert path.stat().st_size < 2**21
    with ZipFile(path) as archive:
        names = archive.namelist()
        kept = b"".join(map(archive.read, names))
    assert sorted(names) == sorted(["mine.py", "other.py"])
    assert b"KEY" in kept
    assert all(f"KEY{number}".encode() not in kept for number in (77, 78, 79, 80))
    assert "not kept, too large: big.py" in raypipe("show", "r", "--code")
    assert "1 equal" in raypipe("replay", "r")


def test_commit_and_changed_files_are_kept(folder):
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], cwd=folder, check=True)
    edit("mine.py", "(x - 3) ** 2", "(x - 3) ** 4")
    raypipe(*MAP, "x=1")
    shown = raypipe("show", "r", "--code")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert f"commit {commit.stdout.strip()}; what files differ is in changes.diff" in shown
    assert "-    return (x - 3) ** 2\n+    return (x - 3) ** 4\n" in shown


def test_a_damaged_archive_is_one_message():
    raypipe(*MAP, "x=1")
    (path,) = Path("r/code").iterdir()
    path.write_bytes(path.read_bytes()[:-30])
    assert f"{path.name}: is damaged (" in raypipe("show", "r", "--code", expected=2)
    with ZipFile(path, "w") as archive:
        archive.writestr("../../evil.py", "")
    assert "lie outside of it" in raypipe("show", "r", "--code", expected=2)


def test_a_run_on_object_storage_is_replayed(folder, remote, monkeypatch):
    raypipe(*MAP, "x=0..2")
    arrow_fs.copy_files(str(folder / "r"), str(folder / "remote"))
    monkeypatch.setattr(command, "opened", lambda _: remote)
    found = rp.replay("bucket://run", every=True)
    assert [each.outcome for each in found.units] == ["equal"] * 3, str(found)
    (fingerprint,) = (key for key, _ in Ledger(remote, writable=False).items("code"))
    assert kept_code(remote, fingerprint) == {"mine.py": MODULE}


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
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert list((folder / "tmp").iterdir()) == []
    assert content("r") == before
