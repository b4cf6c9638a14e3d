"""Files for a cluster, jobs of SLURM and the end of a run; ``tests/slurm`` has the real daemons."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import raypipe as rp
from raypipe.commands import slurm_jobs
from raypipe.store.lock import is_held, writing
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import RunStatus
from tests.command import raypipe, until
from tests.raypipe.composed import status_of, write_status
from tests.scenario import cases, play


@pytest.fixture
def slurm(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for SLURM: ``queue`` is what squeue prints, and ``calls`` has all commands."""
    programs = {
        "sbatch": '[[ "$*" != *=none* ]] || { echo "error: no such partition" >&2; exit 1; }\n'
        'for w; do [[ $w != --comment=* ]] || echo "7|PENDING|Priority|${w#*=}" > queue; done\n'
        "cat > script && bash -n script && echo 7",
        "squeue": "cat queue 2> /dev/null || true",
        "scancel": "rm -f queue",
    }
    for name, text in programs.items():
        program = work / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >> calls\n{text}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{work / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_jobs, "_PERIOD_S", 0.01)
    return work


# files and jobs


@pytest.mark.parametrize("case", cases(__file__, "jobs"), ids=lambda case: case["name"])
def test_commands(slurm, case):
    play(case["commands"], here=str(slurm), version=rp.__version__)


def test_the_configuration_of_a_project_is_found_beside_other_things(folder):
    Path(".#own.yaml").symlink_to("nowhere")  # of an editor
    Path("a.yaml").mkdir()
    Path("own.yaml").write_text("function: own:f\n")
    raypipe("init", "--kubernetes")
    assert "/opt/project/own.yaml" in Path("kubernetes/rayjob.yaml").read_text()


def test_a_job_is_followed_until_it_has_left_the_queue(slurm, monkeypatch):
    run = RunDirectory.at(slurm / "out")
    ends = iter([status_of("interrupted"), status_of("succeeded")])

    def later(seconds: float) -> None:
        run.write(run.status, next(ends).to_bytes())

    # not the time of other threads
    monkeypatch.setattr(slurm_jobs, "time", SimpleNamespace(sleep=later))
    printed = raypipe("submit", "toy.yaml", "--slurm", "--run-dir", "out")
    assert "\njob 7: PENDING (Priority)\ninterrupted" in printed
    assert "\nsucceeded" in printed
    Path("raypipe-7.log").write_text("no cuda\n")
    monkeypatch.setattr(slurm_jobs.time, "sleep", lambda _: Path("queue").unlink())
    printed = raypipe("watch", "out", expected=1)
    assert printed == "job 7: PENDING (Priority)\njob 7 has ended before its run began\nno cuda\n"
    Path("queue").write_text(f"7|COMPLETING|NonZeroExitCode|{run.shown}\n")
    assert not slurm_jobs.job_of(run)


# the end of a run


def hold(run: RunDirectory) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with writing(run, print):
        write_status(run, "running", host=platform.node(), pid=os.getpid())
        time.sleep(60)


def test_the_process_of_a_run_is_ended_and_no_other(folder):
    run = RunDirectory.at(folder / "out")
    process = multiprocessing.get_context("fork").Process(target=hold, args=(run,))
    process.start()
    until(lambda: run.exists(run.status) and is_held(run), "the run goes on")
    found = RunStatus.parse(run.read(run.status))
    for other, message in (
        ({"host": "n7", "pid": 3}, "runs on n7 as process 3; end it there by kill 3,"),
        ({"host": platform.node(), "pid": os.getpid()}, "does not write it"),
    ):
        write_status(run, "running", **other)
        assert message in raypipe("cancel", "out", expected=2)
    assert process.is_alive()
    run.write(run.status, found.to_bytes())
    assert f"process {process.pid} ends; finished units are kept" in raypipe("cancel", "out")
    process.join()
    assert process.exitcode is not None
    refused = raypipe("cancel", "out", expected=2)
    assert "out: does not run; its status is interrupted" in refused
