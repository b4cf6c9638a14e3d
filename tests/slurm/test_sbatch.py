"""Runs as jobs of a SLURM of two nodes: real daemons, real Ray clusters."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.chaos.scene import living
from tests.command import finish, raypipe, table, until
from tests.slurm.daemons import Slurm, started

PROJECT = Path(__file__).parents[2]
SCRIPT = "raypipe.sbatch"
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
    raypipe("init", tmp_path, "--slurm")
    yield tmp_path
    slurm.clear()
    left = lambda: living(str(tmp_path), "SLURM_SUBMIT_DIR")  # noqa: E731
    until(lambda: not left(), "every process ended", 20, detail=left)
    assert not list(Path("/tmp").glob("rp-*-*/*.log")), "a node's directory is left"


def environment(folder: Path) -> dict[str, str]:
    """The variables of a shell with raypipe's environment activated."""
    return {
        "PATH": PATH,
        "PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests/slurm/examples'}",
        "RAYPIPE_CACHE": str(folder / "cache"),
    }


def submit(slurm: Slurm, folder: Path, *words: str | Path, path: str = PATH) -> str:
    """The id of a job with one CPU per node, from a shell with raypipe's environment activated."""
    # small machines rehearse this: the defaults of the script are 8 CPUs and 32 GB
    options = ("--parsable", "--cpus-per-task=1", "--mem=2000")
    return slurm.ask(
        "sbatch",
        *options,
        *map(str, words),
        cwd=folder,
        extra={**environment(folder), "PATH": path},
    )


def programs(folder: Path, **lines: str) -> str:
    """A PATH with programs in front, each of these lines."""
    for name, text in lines.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    return f"{folder / 'bin'}:{PATH}"


def done_by(folder: Path, job: str) -> dict[int, str]:
    """Which worker did which task; every task has one row."""
    rows = table(folder / "runs" / f"slurm-{job}", "evaluations")
    assert rows["T"].is_unique
    return dict(zip(rows["T"], rows["worker"], strict=True))


def test_a_run_on_two_nodes_uses_both_also_where_ray_does_not_start_at_once(slurm, folder):
    fails_once = f'mkdir "$0-$SLURMD_NODENAME" 2> /dev/null && exit 1\nexec {BIN}/ray "$@"'
    path = programs(folder, ray=fails_once)
    words = ("--nodes=2", SCRIPT, "nodes.yaml", "tasks.units=12")
    job = slurm.ended(submit(slurm, folder, *words, path=path))
    assert sorted(each.name for each in (folder / "bin").iterdir()) == ["ray", "ray-n1", "ray-n2"]
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


def test_ray_gets_no_port_for_its_client_without_the_package_of_that(slurm, folder):
    """An environment with the wheel alone has no grpc."""
    path = programs(folder, python=f'exec {BIN}/python -S "$@"', ray='echo "$@"')
    job = slurm.ended(submit(slurm, folder, SCRIPT, "nodes.yaml", path=path))
    assert [word in job.log for word in ("--head", "client")] == [True, False]


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
    command = ("raypipe", "cancel", f"runs/slurm-{job}")
    assert f"job {job} is canceled" in slurm.ask(*command, cwd=folder, extra=environment(folder))
    ended = slurm.ended(job)
    assert (ended.state, ended.restarts) == ("CANCELLED", 0)
    assert "interrupted; finished units are kept" in ended.log
    assert sorted(done_by(folder, job)) == list(range(4))


def test_a_submitted_run_is_followed_through_a_requeue(slurm, folder):
    (folder / SCRIPT).unlink()  # the one that comes with raypipe
    run = ("submit", "nodes.yaml", "--slurm", "--run-dir", "out")
    words = (*run, "tasks.units=10", "tasks.held=6")
    sizes = ("--nodes", "2", "--cpus", "1", "--memory", "2G", "--time", "10m")
    following = slurm.start("raypipe", *words, *sizes, cwd=folder, extra=environment(folder))
    log = lambda: "".join(path.read_text() for path in folder.glob("raypipe-*.log"))  # noqa: E731
    until(lambda: log().count("is done") == 6, "six tasks are done", 300, following, log)
    (job,) = (path.stem.partition("-")[2] for path in folder.glob("raypipe-*.log"))
    with pytest.raises(RuntimeError, match=f"job {job} of this run is in the queue"):
        slurm.ask("raypipe", *run, cwd=folder, extra=environment(folder))
    slurm.ask("scontrol", "requeue", job)  # as a preemption does
    again = lambda: slurm.job(job).state == "PENDING"  # noqa: E731
    until(again, "the job is queued again", 200, following, log)
    time.sleep(2)  # see above
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    printed = finish(following)
    assert printed.startswith(f"job {job} (log: raypipe-{job}.log)")
    assert f"job {job}: PENDING" in printed
    assert "interrupted" in printed
    assert "succeeded" in printed
    assert sorted(table(folder / "out", "evaluations")["T"]) == list(range(10))
    assert slurm.ended(job).restarts == 1


def test_the_jobs_of_an_array_share_a_run_also_where_one_is_killed(slurm, folder):
    words = ("submit", "nodes.yaml", "--slurm", "--run-dir", "out", "tasks.units=60")
    sizes = ("--jobs", "4", "--cpus", "1", "--memory", "2G", "--time", "10m", "--no-follow")
    submitted = slurm.ask("raypipe", *words, *sizes, cwd=folder, extra=environment(folder))
    jobs = [f"{submitted.split()[1]}_{number}" for number in range(4)]
    busy = lambda: [job for job in jobs if "is done" in slurm.job(job).log]  # noqa: E731
    until(lambda: len(busy()) > 1, "two jobs have done tasks", 300)
    shown = slurm.ask("raypipe", "show", "out", cwd=folder, extra=environment(folder))
    assert re.search(r"[2-4] jobs\n", shown)
    slurm.ask("scancel", "--signal=KILL", "--full", busy()[0])
    ended = [slurm.ended(job) for job in jobs]
    assert sorted(job.state for job in ended) == ["CANCELLED", *["COMPLETED"] * 3], ended
    assert sorted(table(folder / "out", "evaluations")["T"]) == list(range(60))


def test_a_job_without_a_run_ends_the_following_with_its_log(slurm, folder):
    (folder / SCRIPT).write_text("#!/bin/bash\necho no module named cuda\nexit 3\n")
    words = ("submit", "nodes.yaml", "--slurm", "--run-dir", "out", "--memory", "100M")
    printed = finish(slurm.start("raypipe", *words, cwd=folder, extra=environment(folder)), 1)
    assert "has ended before its run began\nno module named cuda" in printed


def test_a_rejected_job_leaves_nothing(slurm, folder):
    words = ("submit", "nodes.yaml", "--slurm", "--run-dir", "out", "--partition", "none")
    printed = finish(slurm.start("raypipe", *words, cwd=folder, extra=environment(folder)), 2)
    assert "invalid partition specified: none" in printed
    assert not (folder / "out").exists()
