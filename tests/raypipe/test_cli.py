"""The commands as a user meets them: output, exit status, what is left behind."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from raypipe import hardware
from raypipe.commands import cluster
from raypipe.hardware import Hardware
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.inline import InlineLauncher
from raypipe.store import lock
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.raypipe.toy import TOY, raypipe
from tests.scenario import cases, play


def left(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} - {"__pycache__"}


@pytest.mark.parametrize("case", cases(__file__, "commands"), ids=lambda case: case["name"])
def test_commands(work, case):
    play(case["commands"], here=str(work))


@pytest.mark.parametrize(
    ("name", "size"),
    [*(("results/evaluations/data.parquet", size) for size in (None, 0, 100, -200)),
     ("report/index.html", None), ("config.yaml", -8)],
)  # fmt: skip
def test_a_lost_or_damaged_file_is_written_anew_though_nothing_is_to_do(work, capsys, name, size):
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0
    file = work / "out" / name
    content = file.read_bytes()
    file.unlink()
    if size is not None:
        file.write_bytes(content[:size])
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0
    shown = capsys.readouterr().out
    assert "nothing to do" not in shown
    assert ("WARNING: a damaged file is written again: " in shown) == (size is not None)
    if file.suffix == ".html":  # with the times of the commands
        assert file.stat().st_size > 1000
    else:
        assert file.read_bytes() == content
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_figures_that_fail_cost_no_report(work, capsys, caplog):
    plain, failing = (
        "EXPERIMENT = ",
        "def draw(tables):\n    raise KeyError('level')\n\n\nEXPERIMENT = ",
    )
    own = TOY.replace(plain, failing).replace("stages)\n", "stages, draw)\n")
    (work / "toy.py").write_text(own)
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0
    assert "done: " in capsys.readouterr().out
    assert "the report is without the experiment's sections" in caplog.text
    assert "KeyError: 'level'" in caplog.text
    assert (work / "out/report/index.html").stat().st_size > 1000


def test_a_command_that_ended_before_its_report_is_continued(work, capsys, monkeypatch):
    def ended(*_: object) -> str:
        raise KeyboardInterrupt

    more = ("run", "toy.yaml", "squares.numbers=[1,2,3,4,5]", "--run-dir", "out")
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0
    page = work / "out/report/index.html"
    before = page.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr("raypipe.report.page.build", ended)
        assert raypipe(*more) == 130
    assert page.stat().st_mtime_ns == before
    assert raypipe(*more) == 0
    assert "squares: done before" in capsys.readouterr().out
    assert page.stat().st_mtime_ns > before


def test_a_directory_that_may_not_be_searched_is_a_mistake(work, capsys, monkeypatch):
    def refuse(*given: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    before = left(work)
    with monkeypatch.context() as patch:  # root may search everything
        patch.setattr(RunDirectory, "list", refuse)
        assert raypipe("run", "toy.yaml", "--run-dir", "private/x") == 2
    assert "private/x: cannot be read: [Errno 13]" in capsys.readouterr().err
    assert left(work) == before


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_a_disk_that_is_full_ends_a_run_in_order(after, work, capsys, monkeypatch):
    real, written = os.fsync, []

    def fsync(stream: int) -> None:
        if not stat.S_ISDIR(os.fstat(stream).st_mode):
            written.append(stream)
        if len(written) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(stream)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        assert raypipe("run", "toy.yaml", "--run-dir", "out") == 1
    shown = capsys.readouterr().out
    assert "cannot be written: [Errno 28] No space left on device" in shown
    assert "\n  at " not in shown  # no file of raypipe
    assert f"raypipe run toy.yaml --run-dir {work / 'out'}" in shown
    assert not list(work.rglob("*.tmp"))
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0
    assert len(read_table(RunDirectory.at("out"), "evaluations")) == 3


def test_ray_that_does_not_start_is_a_failure_and_no_traceback(work, capsys, monkeypatch):
    def never(**options: object) -> None:
        raise Exception("The current node timed out during startup")  # as Ray does  # noqa: TRY002

    with monkeypatch.context() as patch:
        patch.setattr(ray, "init", never)
        patch.setattr(ray, "shutdown", lambda: None)  # of other tests' cluster
        patch.setattr(cluster, "start", lambda *_: RayLauncher())
        assert raypipe("run", "toy.yaml", "--run-dir", "out") == 1
    shown = capsys.readouterr().out
    assert "Ray does not start on this machine: The current node timed out" in shown
    assert f"continue with: raypipe run toy.yaml --run-dir {work / 'out'}" in shown
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_imports_has_the_status_of_an_interrupt(tmp_path, sent):
    """Modules import what makes dataclasses, and those are made by ``exec``."""
    (tmp_path / "early.py").write_text(
        "import signal; from raypipe import cli\n"
        f"cli.app = lambda words, **more: exec('signal.raise_signal({int(sent)})')\n"
        "cli.main()"
    )
    words = [sys.executable, "-m", "early"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    ended = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"")


@pytest.mark.parametrize("after", [False, True])
def test_terminated_while_ray_starts_is_interrupted(work, capsys, monkeypatch, after):
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
        assert raypipe("run", "toy.yaml", "--run-dir", "out") == 130
    assert "interrupted; finished units are kept" in capsys.readouterr().out
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0


def test_a_directory_in_use_is_refused(work, capsys):
    with lock.writing(RunDirectory.at("out"), print):
        assert raypipe("run", "toy.yaml", "--run-dir", "out") == 2
    assert "another raypipe command" in capsys.readouterr().err
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0


def test_in_a_ray_job_a_lasting_run_directory_is_required(work, capsys, monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setattr(cluster, "attach", lambda address, stack: InlineLauncher())
    assert raypipe("run", "toy.yaml") == 2
    assert raypipe("run", "toy.yaml", "--run-dir", "relative") == 2
    assert "temporary copy" in capsys.readouterr().err
    assert raypipe("run", "toy.yaml", "--run-dir", str(work / "out")) == 0


def test_doctor_prints_the_hardware(capsys):
    assert raypipe("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cpus"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 2**30
    assert found["torch"].startswith("2.")


def test_gpus_that_cannot_be_used_end_a_command_before_it_starts(work, capsys, monkeypatch):
    lost = Hardware("here", 2, 2**34, gpu_note="no usable GPU", gpu_problems=("GPU 0: lost",))
    monkeypatch.setattr(hardware, "detect", lambda: lost)
    before = left(work)
    assert raypipe("doctor") == 2
    assert "not used: GPU 0: lost" in capsys.readouterr().out
    for command in ("run", "fit", "sweep"):
        assert raypipe(command, "quickstart") == 2
        assert "no GPU can be used: GPU 0: lost; " in capsys.readouterr().err
    assert raypipe("sweep", "sweeps/transformer") == 2
    assert "no GPU can be used" in capsys.readouterr().err
    assert left(work) == before
    assert raypipe("run", "toy.yaml", "--only", "squares", "--run-dir", "part") == 0
    assert raypipe("run", "toy.yaml", "train.scaling.gpus_per_worker=0") == 0
    assert "WARNING: here: not used: GPU 0: lost" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_one_message(work, capsys, monkeypatch):
    assert raypipe("run", "toy.yaml", "--run-dir", "out") == 0
    capsys.readouterr()

    def full(stream: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert raypipe("report", "out") == 2
    assert f"{work / 'out'}/report: cannot be written: [Errno 28]" in capsys.readouterr().err
    assert not list(work.rglob("*.tmp"))
    (work / "out/config.yaml").unlink()
    (work / "out/config.yaml").mkdir()
    assert raypipe("report", "out") == 2
    assert "out/config.yaml: is damaged or unreadable" in capsys.readouterr().err


def test_the_command_on_a_report_can_be_pasted(work):
    assert raypipe("run", "toy.yaml", "--run-dir", "my out") == 0
    for _ in range(2):
        text = (work / "my out/report/index.html").read_text()
        page = html.unescape(re.sub(r"</?span[^>]*>", "", text))
        assert f"raypipe run toy.yaml --run-dir '{work}/my out'" in page
        assert raypipe("report", "my out") == 0
