"""The processes of a script: no one survives its end, whoever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import UnitError
from raypipe.scripts.run import failure_of, running
from tests.command import is_alive, until
from tests.scenario import cases

#: a child and a grandchild in a session of its own, which ignore SIGTERM, as their parent may
STUBBORN = """
trap '' TERM
(setsid sleep 600 & touch pid$!; exec sleep 600) & touch pid$!
[ "$0" = ignore ] || trap - TERM
while [ $(ls pid* | wc -l) -lt 2 ]; do sleep 0.01; done
touch pid$$; echo ready
[ "$0" = leave ] || exec sleep 600
"""


def script(folder: Path, how: str) -> AbstractContextManager[tuple[subprocess.Popen[bytes], Any]]:
    argv = ["sh", "-c", STUBBORN, how]
    return running(argv, folder, os.environ, folder / "log", 0.3)


def processes(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("pid")) for path in folder.glob("pid*")}


@pytest.mark.parametrize("how", ["", "ignore", "leave", "raise"])
def test_the_end_is_that_of_the_whole_tree(tmp_path, how):
    """SIGTERM, SIGKILL, what a script leaves, and an exception in the body."""
    status = {"": -signal.SIGTERM, "ignore": -signal.SIGKILL, "leave": 0}
    with suppress(KeyboardInterrupt), script(tmp_path, how) as (process, _):
        until(lambda: len(processes(tmp_path)) == 3, "three processes run", 120)
        if how == "raise":
            raise KeyboardInterrupt
        if how != "leave":
            process.stdin.close()
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
    with running(argv, tmp_path, os.environ, tmp_path / "log", 1, heard.append) as (run, errors):
        until(lambda: run.poll() is not None, "it ends", 120)
        assert run.poll() == 3
    assert (len(errors), [*errors][-2:]) == (200, ["299", "end"])
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
