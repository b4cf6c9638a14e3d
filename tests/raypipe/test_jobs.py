"""Files for a cluster, jobs of SLURM and the end of a run; ``tests/slurm`` has the real daemons."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import raypipe as rp
from raypipe.commands import jobs
from raypipe.store.lock import is_held, writing
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import RunStatus
from tests.command import raypipe, until

SUBMIT = ("submit", "toy.yaml", "--slurm", "--run-dir", "out")


@pytest.fixture
def slurm(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for SLURM: ``queue`` is what squeue prints, and ``calls`` has all commands."""
    programs = {
        "sbatch": '[[ "$*" != *=none* ]] || { echo "error: no such partition" >&2; exit 1; }\n'
        'for word; do [[ $word != --comment=* ]] || echo "7|PENDING|${word#*=}" > queue; done\n'
        "cat > script\necho 7",
        "squeue": "cat queue 2> /dev/null || true",
        "scancel": "rm queue",
    }
    for name, text in programs.items():
        program = work / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >> calls\n{text}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{work / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(jobs, "_PERIOD_S", 0.01)
    return work


def status(word: str, **more: object) -> RunStatus:
    at = datetime.now(UTC).isoformat()
    return RunStatus("toy", "toy-1", "raypipe run toy.yaml", word, at, at, at, **more)  # type: ignore[arg-type]


# files


def test_the_script_of_a_job_has_the_sizes_that_are_given(folder):
    raypipe("init", "--slurm")
    text = Path("raypipe.sbatch").read_text()
    for line in ("nodes=1", "cpus-per-task=8", "mem=32G", "time=24:00:00"):
        assert f"\n#SBATCH --{line}\n" in text
    assert not [name for name in ("account", "partition", "gpus") if f"#SBATCH --{name}" in text]
    sizes = (
        "--nodes",
        "2",
        "--cpus",
        "4",
        "--memory",
        "64G",
        "--gpus",
        "1",
        "--time",
        "1-12:00:00",
    )
    printed = raypipe("init", "own", "--slurm", *sizes, "--account", "me", "--partition", "a,b")
    assert printed.startswith("wrote own/raypipe.sbatch\nnext:\nraypipe submit CONFIG")
    text = Path("own/raypipe.sbatch").read_text()
    lines = ("nodes=2", "cpus-per-task=4", "mem=64G", "gpus-per-node=1", "time=36:00:00")
    for line in (*lines, "account=me", "partition=a,b"):
        assert f"\n#SBATCH --{line}\n" in text
    subprocess.run(["bash", "-n", "own/raypipe.sbatch"], check=True)


def test_the_nodes_of_kubernetes_have_the_project_and_its_sizes(folder):
    raypipe("init", "mine")
    Path("mine/pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\n')
    sizes = ("--nodes", "3", "--cpus", "6", "--memory", "24G", "--gpus", "0")
    printed = raypipe("init", "mine", "--kubernetes", *sizes)
    assert "docker build -f kubernetes/Dockerfile -t REGISTRY/mine:1 ." in printed
    _, job = yaml.safe_load_all(Path("mine/kubernetes/rayjob.yaml").read_text())
    assert "/opt/project/svm.yaml --run-dir /runs/mine" in job["spec"]["entrypoint"]
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "6", "memory": "24Gi"}
    assert group["maxReplicas"] == 3
    assert "install --no-cache-dir -e ." in Path("mine/kubernetes/Dockerfile").read_text()
    assert (
        f"raypipe-runner[cluster]=={rp.__version__}\n" in Path("mine/requirements.txt").read_text()
    )


@pytest.mark.parametrize("text", ["project = 3", "["])
def test_a_description_of_a_package_that_is_none_is_refused(folder, text):
    Path("pyproject.toml").write_text(text)
    assert raypipe("init", "--slurm", expected=2).startswith("raypipe: pyproject.toml: is not ")
    assert not Path("raypipe.sbatch").exists()


def test_the_nodes_of_aws_install_the_packages_of_the_project(folder):
    Path("requirements.txt").write_text("mine==1\n")
    raypipe("init", "--aws", "--nodes", "5")
    assert Path("requirements.txt").read_text() == "mine==1\n"
    cluster = yaml.safe_load(Path("cluster.yaml").read_text())
    assert cluster["max_workers"] == 7
    assert cluster["available_node_types"]["cpu"]["max_workers"] == 5
    assert "-r ~/project/requirements.txt" in str(cluster["setup_commands"])
    assert "-e ~/project" not in str(cluster["setup_commands"])  # it is not a package
    again = raypipe("init", "--aws", expected=2)
    assert "cluster.yaml: exists already" in again


def test_the_configuration_of_a_project_is_found_beside_other_things(folder):
    Path(".#own.yaml").symlink_to("nowhere")  # of an editor
    Path("a.yaml").mkdir()
    Path("own.yaml").write_text("function: own:f\n")
    raypipe("init", "--kubernetes")
    assert "/opt/project/own.yaml" in Path("kubernetes/rayjob.yaml").read_text()


def test_the_folder_of_a_cluster_is_not_a_file(folder):
    Path("taken").touch()
    assert "raypipe: taken: cannot be written" in raypipe("init", "taken", "--slurm", expected=2)


# jobs of SLURM


def test_a_run_is_submitted_with_its_command_and_canceled(slurm):
    sizes = ("--cpus", "4", "--time", "7199.5s")
    printed = raypipe(*SUBMIT, "squares.numbers=[4]", *sizes, "--no-follow")
    out = slurm / "out"
    follow = f"follow it: raypipe watch {out}; end it: raypipe cancel {out}\n"
    assert printed == f"job 7 (log: raypipe-7.log); {follow}"
    called = (slurm / "calls").read_text().split("\nsbatch\n")[1].splitlines()
    options = ["--parsable", "--cpus-per-task=4", "--time=2:00:00", f"--comment={out}"]
    words = ["/dev/stdin", "toy.yaml", "squares.numbers=[4]", "--run-dir", str(out)]
    assert called == [*options, "--output=raypipe-%j.log", *words]
    assert (slurm / "script").read_text() == Path("out/.raypipe.sbatch").read_text()
    assert "#SBATCH --cpus-per-task=8\n" in (slurm / "script").read_text()
    again = raypipe(*SUBMIT, expected=2)
    assert f"out: job 7 of this run is in the queue; follow it: raypipe watch {out}" in again
    assert "job 7 is canceled" in raypipe("cancel", "out")
    assert "is not a run directory" in raypipe("cancel", "out", expected=2)


def test_the_script_of_the_project_is_the_one_that_is_submitted(slurm):
    Path("raypipe.sbatch").write_text("#!/bin/bash\nmodule load cuda\n")
    raypipe(*SUBMIT, "--no-follow")
    assert Path("script").read_text().endswith("module load cuda\n")


def test_a_job_is_followed_until_it_has_left_the_queue(slurm, monkeypatch):
    run = RunDirectory.at(slurm / "out")
    ends = iter([status("interrupted"), status("succeeded")])

    def later(seconds: float) -> None:
        run.write(run.status, next(ends).to_bytes())

    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=later))  # not that of other threads
    printed = raypipe(*SUBMIT)
    assert "\njob 7: PENDING\ninterrupted" in printed
    assert "\nsucceeded" in printed
    Path("raypipe-7.log").write_text("no module named cuda\n")
    monkeypatch.setattr(jobs.time, "sleep", lambda _: Path("queue").unlink())
    printed = raypipe("watch", "out", expected=1)
    assert printed == "job 7: PENDING\njob 7 has ended before its run began\nno module named cuda\n"


def test_mistakes_are_refused_before_anything_is_submitted(slurm, monkeypatch):
    for words, message in (
        ((*SUBMIT, "squares.numbrs=[1]"), "did you mean squares.numbers?"),
        ((*SUBMIT, "--partition", "none"), "raypipe: error: no such partition"),
        ((*SUBMIT, "--partition", "a b"), "--partition a b: must be a name without spaces"),
        ((*SUBMIT, "--memory", "64"), "--memory 64: must be a number with M, G or T, such as 64G"),
        ((*SUBMIT, "--cpus", "0"), "--cpus 0: must be a number from 1"),
        ((*SUBMIT, "--time", "soon"), "--time 'soon': must be a time above zero"),
        ((*SUBMIT, "--address", "http://h:8265"), "give --address of a Ray cluster, or --slurm"),
        (("submit", "toy.yaml", "--run-dir", "out"), "give --address of a Ray cluster, or --slurm"),
        (("submit", "toy.yaml", "--run-dir", "/out", "--address", "http://h:8265", "--time", "1h"),
         "--time: belongs to --slurm; leave it out"),
        (("init", "--kubernetes", "--time", "1h"), "--time: belongs to --slurm; leave it out"),
        (("init", "--cpus", "4"), "--cpus: belongs to --slurm or --kubernetes; leave it out"),
        (("init", "--slurm", "--aws"), "--slurm, --aws: give one of them"),
        (("init", "--slurm", "--template", "training"), "--template training: is a project"),
    ):  # fmt: skip
        assert message in raypipe(*words, expected=2)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "--slurm: sbatch is not found" in raypipe(*SUBMIT, expected=2)
    assert not Path("out").exists()
    assert not Path("queue").exists()


# the end of a run


def hold(run: RunDirectory) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with writing(run, print):
        found = status("running", host=platform.node(), pid=os.getpid())
        run.write(run.status, found.to_bytes())
        time.sleep(60)


def test_the_process_of_a_run_is_ended_and_no_other(folder):
    run = RunDirectory.at(folder / "out")
    process = multiprocessing.get_context("fork").Process(target=hold, args=(run,))
    process.start()
    until(lambda: run.exists(run.status) and is_held(run), "the run goes on")
    found = RunStatus.parse(run.read(run.status))
    for other, message in (
        (status("running", host="n7", pid=3), "runs on n7 as process 3; call raypipe cancel there"),
        (status("running", host=platform.node(), pid=os.getpid()), "does not write it"),
    ):
        run.write(run.status, other.to_bytes())
        assert message in raypipe("cancel", "out", expected=2)
    assert process.is_alive()
    run.write(run.status, found.to_bytes())
    assert f"process {process.pid} ends; finished units are kept" in raypipe("cancel", "out")
    process.join()
    assert process.exitcode is not None
    refused = raypipe("cancel", "out", expected=2)
    assert "out: does not run; its status is interrupted" in refused
