"""``slurm/raypipe.sbatch`` under a SLURM of two nodes: real daemons, real Ray clusters."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.chaos.scene import living
from tests.command import table, until
from tests.slurm.daemons import Slurm, started

PROJECT = Path(__file__).parents[2]
SCRIPT = PROJECT / "slurm" / "raypipe.sbatch"
BIN = Path(sys.executable).parent
PATH = f"{BIN}:{os.environ['PATH']}"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with started(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def folder(tmp_path: Path, slurm: Slurm) -> Iterator[Path]:
    """Where jobs are submitted; at the end nothing of them may be left on the nodes."""
    (tmp_path / "nodes.yaml").write_text("experiment: example_nodes\n")
    yield tmp_path
    slurm.clear()
    left = lambda: living(str(tmp_path), "SLURM_SUBMIT_DIR")  # noqa: E731
    until(lambda: not left(), "every process ended", 20, detail=left)
    assert not list(Path("/tmp").glob("rp-*-*/*.log")), "a node's directory is left"


def submit(slurm: Slurm, folder: Path, *words: str | Path, path: str = PATH) -> str:
    """The id of a job with one CPU per node, from a shell with raypipe's environment activated."""
    environment = {
        "PATH": path,
        "PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests/slurm/examples'}",
        "RAYPIPE_CACHE": str(folder / "cache"),
    }
    # small machines rehearse this: the defaults of the script are 128 CPUs and 256 GB
    options = ("--parsable", "--cpus-per-task=1", "--mem=2000")
    return slurm.ask("sbatch", *options, *map(str, words), cwd=folder, extra=environment)


def done_by(folder: Path, job: str) -> dict[int, str]:
    """Which worker did which task; every task has one row."""
    rows = table(folder / "runs" / f"slurm-{job}", "evaluations")
    assert rows["T"].is_unique
    return dict(zip(rows["T"], rows["worker"], strict=True))


def test_a_run_on_two_nodes_uses_both_also_where_ray_does_not_start_at_once(slurm, folder):
    slow = folder / "bin" / "ray"
    slow.parent.mkdir()
    slow.write_text(
        f'#!/bin/bash\nmkdir "$0-$SLURMD_NODENAME" 2> /dev/null && exit 1\nexec {BIN}/ray "$@"\n'
    )
    slow.chmod(0o755)
    words = ("--nodes=2", SCRIPT, "nodes.yaml", "tasks.units=12")
    job = slurm.ended(submit(slurm, folder, *words, path=f"{slow.parent}:{PATH}"))
    assert sorted(path.name for path in slow.parent.iterdir()) == ["ray", "ray-n1", "ray-n2"]
    assert (job.state, job.status) == ("COMPLETED", 0), job.log
    workers = done_by(folder, job.id)
    assert sorted(workers) == list(range(12))
    # none has a GPU, though the nodes have some; workers of a training meet on the real network
    assert set(workers.values()) == {"n1  eth0", "n2  eth0"}
    assert "done: " in job.log
    assert "\x1b" not in job.log
    assert "rror" not in job.log


def test_gpus_of_the_whole_job_are_those_of_its_nodes(slurm, folder):
    job = submit(slurm, folder, "--nodes=2", "--gpus=2", SCRIPT, "nodes.yaml", "tasks.gpus=1")
    ended = slurm.ended(job)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.log
    assert set(done_by(folder, job).values()) == {"n1 0 eth0", "n2 0 eth0"}


def test_the_exit_status_is_the_commands_also_of_two_jobs_on_a_node(slurm, folder):
    failing = submit(slurm, folder, "--partition=gpu", "--gpus-per-node=1", SCRIPT,
                     "nodes.yaml", "tasks.gpus=1", "tasks.broken=3")  # fmt: skip
    mistaken = submit(slurm, folder, "--partition=gpu", SCRIPT, "nodes.yaml",
                      "tasks.unit=3", "--run-dir", "elsewhere")  # fmt: skip
    until(lambda: slurm.job(mistaken).state != "PENDING", "the second job starts")
    assert slurm.job(failing).state == "RUNNING", "two jobs on a node"
    ended = [slurm.ended(job) for job in (failing, mistaken)]
    assert [(job.state, job.status) for job in ended] == [("FAILED", 1), ("FAILED", 2)], ended
    assert "broken on purpose" in ended[0].log
    assert set(done_by(folder, failing).values()) == {"n2 0 None"}
    assert "did you mean tasks.units" in ended[1].log
    assert not (folder / "elsewhere").exists()


@pytest.mark.parametrize(
    ("words", "path", "message"),
    [((), PATH, "which configuration?"), (("nodes.yaml",), "/usr/bin:/bin", "is not on PATH")],
)
def test_what_cannot_run_says_so_before_ray_starts(slurm, folder, words, path, message):
    job = slurm.ended(submit(slurm, folder, SCRIPT, *words, path=path))
    assert (job.state, job.status) == ("FAILED", 2)
    assert message in job.log


def test_at_the_time_limit_the_job_is_queued_again_and_continues(slurm, folder):
    job = submit(slurm, folder, "--nodes=2", "--time=10", "--signal=B:USR1@60", SCRIPT,
                 "nodes.yaml", "tasks.units=10", "tasks.held=6")  # fmt: skip
    log = lambda: slurm.job(job).log  # noqa: E731
    until(lambda: log().count("is done") == 6, "six tasks are done", 300, detail=log)
    # the controller looks twice a minute whose end is near, and sends the signal early
    soon = datetime.now() + timedelta(seconds=120)
    slurm.ask("scontrol", "update", f"JobId={job}", f"EndTime={soon:%Y-%m-%dT%H:%M:%S}")
    again = lambda: slurm.job(job).restarts == 1  # noqa: E731
    until(again, "the job is queued again", 200, detail=log)
    # it would wait for two minutes; in the second in which it ended nodes refuse it (its credential
    # is revoked by the second)
    time.sleep(2)
    slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=10", "StartTime=now")
    ended = slurm.ended(job)
    assert (ended.state, ended.status) == ("COMPLETED", 0), ended.log
    assert "interrupted; finished units are kept" in ended.log
    assert sorted(done_by(folder, job)) == list(range(10))
    assert [ended.log.count(f"tasks/{i} is done") for i in range(10)] == [1] * 10


def test_a_cancelled_job_ends_in_order_and_stays_cancelled(slurm, folder):
    job = submit(slurm, folder, "--nodes=2", SCRIPT, "nodes.yaml", "tasks.held=4")
    log = lambda: slurm.job(job).log  # noqa: E731
    until(lambda: log().count("is done") == 4, "four tasks are done", 300, detail=log)
    slurm.ask("scancel", job)
    ended = slurm.ended(job)
    assert (ended.state, ended.restarts) == ("CANCELLED", 0)
    assert "interrupted; finished units are kept" in ended.log
    assert sorted(done_by(folder, job)) == list(range(4))
