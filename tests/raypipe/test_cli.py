"""The commands as a user meets them: output, exit status, what is left behind."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import ray

from raypipe import hardware
from raypipe.commands import cluster
from raypipe.hardware import Hardware
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.inline import InlineLauncher
from raypipe.store import lock
from raypipe.store.run_directory import RunDirectory
from tests.command import finish, in_process, raypipe, spawn, table
from tests.scenario import cases, edit, play


@pytest.mark.parametrize("case", cases(__file__, "commands"), ids=lambda case: case["name"])
def test_commands(work, case):
    play(case["commands"], here=str(work))


@pytest.mark.parametrize(
    ("name", "size"),
    [("results/evaluations/data.parquet", None), ("results/evaluations/data.parquet", -200),
     ("report/index.html", None), ("config.yaml", -8)],
)  # fmt: skip
@pytest.mark.usefixtures("report")
def test_a_lost_or_damaged_file_is_written_anew_though_nothing_is_to_do(work, name, size):
    raypipe("run", "toy.yaml", "--run-dir", "out")
    file = work / "out" / name
    content = file.read_bytes()
    file.unlink()
    if size is not None:
        file.write_bytes(content[:size])
    shown = raypipe("run", "toy.yaml", "--run-dir", "out")
    assert "nothing to do" not in shown
    assert ("WARNING: a damaged file is written again: " in shown) == (size is not None)
    if file.suffix == ".html":  # with the times of the commands
        assert file.stat().st_size > 1000
    else:
        assert file.read_bytes() == content
    assert "nothing to do" in raypipe("run", "toy.yaml", "--run-dir", "out")


@pytest.mark.usefixtures("report")
def test_figures_that_fail_cost_no_report(work, caplog):
    failing = "def draw(tables):\n    raise KeyError('level')\n\n\nEXPERIMENT = "
    edit("toy.py", "EXPERIMENT = ", failing)
    edit("toy.py", "stages)\n", "stages, draw)\n")
    assert "done: " in raypipe("run", "toy.yaml", "--run-dir", "out")
    assert "the report is without the experiment's sections" in caplog.text
    assert "KeyError: 'level'" in caplog.text
    assert (work / "out/report/index.html").stat().st_size > 1000


@pytest.mark.usefixtures("report")
def test_a_command_that_ended_before_its_report_is_continued(work, monkeypatch):
    def ended(*_: object) -> str:
        raise KeyboardInterrupt

    more = ("run", "toy.yaml", "squares.numbers=[1,2,3,4,5]", "--run-dir", "out")
    raypipe("run", "toy.yaml", "--run-dir", "out")
    page = work / "out/report/index.html"
    before = page.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr("raypipe.report.page.build", ended)
        raypipe(*more, expected=130)
    assert page.stat().st_mtime_ns == before
    assert "squares: done before" in raypipe(*more)
    assert page.stat().st_mtime_ns > before


@contextmanager
def full_disk(after: int = 0) -> Iterator[None]:
    """The disk is full when so many files are written."""
    written: list[int] = []

    def fsync(stream: int) -> None:
        if not stat.S_ISDIR(os.fstat(stream).st_mode):
            written.append(stream)
        if len(written) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.mark.parametrize("after", [0, 3, 5])
def test_a_disk_that_is_full_ends_a_run_in_order(after, work):
    with full_disk(after):
        shown = raypipe("run", "toy.yaml", "--run-dir", "out", expected=1)
    assert "cannot be written: [Errno 28] No space left on device" in shown
    assert "\n  at " not in shown  # no file of raypipe
    assert f"raypipe run toy.yaml --run-dir {work / 'out'}" in shown
    assert not list(work.rglob("*.tmp"))
    raypipe("run", "toy.yaml", "--run-dir", "out")
    assert len(table("out", "evaluations")) == 3


def test_ray_that_does_not_start_is_a_failure_and_no_traceback(work, monkeypatch):
    def never(**options: object) -> None:
        raise Exception("The current node timed out during startup")  # as Ray does  # noqa: TRY002

    with monkeypatch.context() as patch:
        patch.setattr(ray, "init", never)
        patch.setattr(ray, "shutdown", lambda: None)  # of other tests' cluster
        patch.setattr(cluster, "start", lambda *_: RayLauncher())
        ended = in_process(None, "run", "toy.yaml", "--run-dir", "out", environment={})
    assert ended.status == 1
    assert "Ray does not start on this machine: The current node timed out" in ended.output
    assert f"continue with: raypipe run toy.yaml --run-dir {work / 'out'}" in ended.output
    raypipe("run", "toy.yaml", "--run-dir", "out")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_imports_has_the_status_of_an_interrupt(tmp_path, sent):
    """Modules import what makes dataclasses, and those are made by ``exec``."""
    (tmp_path / "early.py").write_text(
        "import signal; from raypipe import cli\n"
        f"cli.app = lambda words, **more: exec('signal.raise_signal({int(sent)})')\n"
        "cli.main()"
    )
    project = {"PYTHONPATH": str(Path.cwd())}
    assert finish(spawn(tmp_path, sys.executable, "-m", "early", environment=project), 130) == ""


@pytest.mark.parametrize("after", [False, True])
def test_terminated_while_ray_starts_is_interrupted(work, monkeypatch, after):
    def slowly(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        if not after:
            signal.raise_signal(signal.SIGTERM)

    def start(*_: object) -> RayLauncher:
        launcher = RayLauncher()
        signal.raise_signal(signal.SIGTERM)
        return launcher

    with monkeypatch.context() as patch:
        patch.setattr(ray, "init", slowly)
        patch.setattr("raypipe.launch.cluster.living_nodes", dict)
        patch.setattr(cluster, "start", start)
        ended = in_process(None, "run", "toy.yaml", "--run-dir", "out", environment={})
    assert ended.status == 130
    assert "interrupted; finished units are kept" in ended.output
    raypipe("run", "toy.yaml", "--run-dir", "out")


def test_a_directory_in_use_is_refused(work):
    with lock.writing(RunDirectory.at("out"), print):
        shown = raypipe("run", "toy.yaml", "--run-dir", "out", expected=2)
    assert "another raypipe command" in shown
    raypipe("run", "toy.yaml", "--run-dir", "out")


def test_in_a_ray_job_a_lasting_run_directory_is_required(work, monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setattr(cluster, "attach", lambda address, stack: InlineLauncher())
    raypipe("run", "toy.yaml", expected=2)
    assert "temporary copy" in raypipe("run", "toy.yaml", "--run-dir", "relative", expected=2)
    raypipe("run", "toy.yaml", "--run-dir", str(work / "out"))


def test_gpus_that_cannot_be_used_end_a_command_before_it_starts(work, monkeypatch):
    lost = Hardware("here", 2, 2**34, gpu_note="no usable GPU", gpu_problems=("GPU 0: lost",))
    monkeypatch.setattr(hardware, "detect", lambda: lost)
    config = "experiment: example_sweep\nsweep: {stage: train, axes: {training.micro_batch: [1]}}\n"
    (work / "trained.yaml").write_text(config)
    before = set(work.iterdir())
    doctor = in_process(None, "doctor", environment={})
    assert doctor.status == 2
    assert "not used: GPU 0: lost" in doctor.output
    for command in ("run", "fit", "sweep"):
        assert "no GPU can be used: GPU 0: lost; " in raypipe(command, "trained.yaml", expected=2)
    assert set(work.iterdir()) == before
    raypipe("run", "toy.yaml", "--only", "squares", "--run-dir", "part")
    shown = raypipe("run", "toy.yaml", "train.scaling.gpus_per_worker=0")
    assert "WARNING: here: not used: GPU 0: lost" in shown


def test_a_report_that_cannot_be_written_is_one_message(work):
    raypipe("run", "toy.yaml", "--run-dir", "out")
    with full_disk():
        shown = raypipe("report", "out", expected=2)
    assert f"{work / 'out'}/report: cannot be written: [Errno 28]" in shown
    assert not list(work.rglob("*.tmp"))
    config, damaged = work / "out/config.yaml", "out/config.yaml: is damaged or unreadable"
    config.write_bytes(b"\xff\xfe")
    assert damaged in raypipe("report", "out", expected=2)
    config.unlink()
    config.mkdir()
    assert damaged in raypipe("report", "out", expected=2)


@pytest.mark.parametrize("template", ["function", "training"])
def test_the_tests_of_a_template_pass(folder, monkeypatch, template):
    raypipe("init", template, "--template", template)
    monkeypatch.syspath_prepend(folder / template)
    (file,) = Path(template).glob("test_*.py")
    names = vars(importlib.import_module(file.stem))
    tests = [each for name, each in names.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_the_printed_commands_of_the_training_work(folder, monkeypatch):
    printed = raypipe("init", "mine", "--template", "training").splitlines()
    _install, first, *_ = printed[printed.index("cd mine") + 1 :]
    monkeypatch.chdir("mine")
    raypipe(*first.split()[1:], "train.training.steps=60")
    assert table("runs/first", "steps")["eval_accuracy"].dropna().iloc[-1] > 0.7


def test_a_local_run_starts_no_cluster(work, monkeypatch):
    for name in ("start", "attach"):
        monkeypatch.setattr(cluster, name, pytest.fail)
    raypipe("run", "toy.yaml", "--local")


def test_a_run_continues_with_and_without_ray(work, launcher: RayLauncher):
    """Prove equal identities and rows: what one stored, the other neither refuses nor repeats."""

    def run(folder: str, *words: str) -> str:
        done = in_process(launcher, "run", "toy.yaml", *words, "--run-dir", folder, environment={})
        assert done.status == 0, done.output
        return done.output

    some, more = "squares.numbers=[3,4]", "squares.numbers=[3,4,5,6]"
    run("local", some, "--local")
    run("ray", some)
    assert "nothing to do" in run("local", some)
    assert "nothing to do" in run("ray", some, "--local")
    run("local", more)
    run("ray", more, "--local")
    local, ray = (
        table(name, "evaluations").set_index("dataset")["value"].sort_index()
        for name in ("local", "ray")
    )
    pd.testing.assert_series_equal(local, ray)
    assert len(local) == 4
