"""The processes of a script: no one survives its end, whoever ends it."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from raypipe.errors import UnitError
from raypipe.scripts.run import ScriptProcess, failure_of
from tests.command import is_alive, until
from tests.scenario import cases

#: a child and a grandchild in a session of its own, which ignore SIGTERM, as their parent may
STUBBORN = """
import os, signal, subprocess, sys, time
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = ("import os,signal,time,subprocess,sys\\n"
         "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
         "if len(sys.argv) == 1:\\n"
         "    subprocess.Popen([sys.executable, '-c', open(0).read(), 'x'], start_new_session=True,"
         "stdin=open('child.py'))\\n"
         "open(f'pid{os.getpid()}', 'w').close()\\n"
         "time.sleep(600)\\n")
open("child.py", "w").write(child)
subprocess.Popen([sys.executable, "child.py"], stdin=open("child.py"))
while len([name for name in os.listdir() if name.startswith("pid")]) < 2:
    time.sleep(0.01)
open(f"pid{os.getpid()}", "w").close()
print("ready", flush=True)
if "leave" not in sys.argv:
    time.sleep(600)
"""


def script(folder: Path, how: str) -> ScriptProcess:
    (folder / "stubborn.py").write_text(STUBBORN)
    argv = [sys.executable, "stubborn.py", how]
    return ScriptProcess(argv, folder, os.environ, folder / "log", 0.3)


def processes(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("pid")) for path in folder.glob("pid*")}


@pytest.mark.parametrize("how", ["", "ignore", "leave", "raise"])
def test_the_end_is_that_of_the_whole_tree(tmp_path, how):
    """SIGTERM, SIGKILL, what a script leaves, and an exception in the body."""
    status = {"": -signal.SIGTERM, "ignore": -signal.SIGKILL, "leave": 0}
    with suppress(KeyboardInterrupt), script(tmp_path, how) as process:
        until(lambda: len(processes(tmp_path)) == 3, "three processes run", 120)
        if how == "raise":
            raise KeyboardInterrupt
        if how != "leave":
            process.end()
        until(lambda: process.poll() is not None, "it ends", 120)
        assert process.poll() == status[how]
    assert not any(map(is_alive, processes(tmp_path)))
    assert (tmp_path / "log").read_text() == "ready\n"


def test_output_is_logged_and_the_last_lines_of_errors_are_kept(tmp_path):
    code = (
        "import sys; print('out s3://me:secret@bucket', flush=True)\n"
        "sys.stderr.write(' 1%\\r 99%\\n' + ''.join(f'{n}\\n' for n in range(300)) + 'end')\n"
        "sys.exit(3)"
    )
    heard: list[str] = []
    argv = [sys.executable, "-c", code]
    with ScriptProcess(argv, tmp_path, os.environ, tmp_path / "log", 1, heard.append) as run:
        until(lambda: run.poll() is not None, "it ends", 120)
        assert run.poll() == 3
        errors = run.errors()
    assert (len(errors), errors[-2:]) == (200, ["299", "end"])
    assert heard == ["out s3://me:secret@bucket"]
    log = (tmp_path / "log").read_text()
    assert "99%" in log
    assert "out s3://***@bucket\n" in log


@pytest.mark.parametrize(
    "end", cases(__file__, "ends"), ids=lambda end: f"{end['status']} {end['kind']}"
)
def test_kinds_of_failures(end):
    failure = failure_of("u", end["status"], end["errors"].split("\n"), 8)
    assert isinstance(failure, UnitError)
    assert failure.kind == end["kind"]
    assert failure.message.startswith(end["message"])
    assert (failure.limit is not None) == (end["kind"] == "out_of_memory")
