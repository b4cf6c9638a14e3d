"""Commands that start Ray: where that goes wrong, and what they need for many units."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.scaling.runs import run_command
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from tests.command import finish, in_process, start

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture
def mine(folder: Path) -> Path:
    """A folder with the user's function."""
    (folder / "mine").mkdir()
    (folder / "mine" / "m.py").write_text("def f(x):\n    return {'y': 2 * x}\n")
    return folder / "mine"


@pytest.mark.parametrize("scheme", ["", "ray://", "http://"])
def test_a_dead_ray_address_is_one_message_that_names_the_variable(
    mine: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.chdir(mine)
    address = f"{scheme}127.0.0.1:1"
    words = ("map", "m:f", "x=[1]", "--run-dir", "r")
    ended = in_process(None, *words, environment={"RAY_ADDRESS": address})
    begin = f"raypipe: RAY_ADDRESS={address}: no Ray cluster can be reached there"
    assert (ended.status, ended.output[: len(begin)]) == (2, begin)
    assert ended.output.count("\n") == 1
    assert [file.name for file in mine.iterdir()] == ["m.py"]


def test_ray_starts_beside_files_with_names_of_modules_and_in_any_environment(
    mine: Path, tmp_path: Path
) -> None:
    """Files that hide Python's modules, a long TMPDIR as of SLURM, and a home that is read-only."""
    names = ["grpc", "json", "queue", "random", "ray", "statistics", "yaml"]
    for name in names:
        (mine / f"{name}.py").write_text(f"raise RuntimeError('the user has {name}')")
    (mine / "near").mkdir()
    (mine / "near" / "m2.py").write_text(
        "import queue, random, m\ndef f(x):\n    import statistics\n    return m.f(x)\n"
    )
    (mine / "near" / "x.yaml").write_text("function: m2:f\narguments: {x: [1, 2]}\n")
    (long := tmp_path / ("long" * 20)).mkdir()
    # the command as installed; `python -m` puts the folder on Python's own search path
    script = "import sys; sys.path.remove(''); from raypipe import cli; cli.main()"
    process = subprocess.run(
        [sys.executable, "-c", script, "run", "near/x.yaml", "--run-dir", "r"],
        cwd=mine,
        env={
            **{"PATH": "/usr/bin:/bin", "TMPDIR": str(long), "HOME": "/proc/nope"},
            "RAYPIPE_CACHE": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    shadowing = ", ".join(f"{name}.py" for name in names)
    assert f"WARNING: {shadowing}: has the name of a module of Python" in process.stdout
    assert (mine / "r" / "results" / "calls").is_dir()


def begun(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A command whose calls, of which one waits, have started."""
    (folder / "slow.py").write_text("import time\ndef f(x):\n    time.sleep(x)\n    return x\n")
    arguments = ("map", "slow:f", "x=[0,300]", "--cpus", "0.5", "--run-dir", "r", *words)
    process = start(folder, *arguments, environment={"RAY_ADDRESS": ""})
    assert any("calls: started" in line for line in process.stdout), "the command ended"
    return process


@pytest.mark.slow
def test_a_killed_raylet_fails_the_run_with_the_command_that_continues(mine: Path) -> None:
    """Ray itself would end the process ten seconds later, and leave nothing but its own log."""
    process = begun(mine)
    time.sleep(3)  # at once it would be while the driver uses the object store, which ends it
    children = psutil.Process(process.pid).children()
    next(child for child in children if child.name() == "raylet").kill()
    output = finish(process, 1, 120)
    assert "failed: calls: ray: node_lost: Ray's process on this machine (raylet) died" in output
    assert "continue with: raypipe map slow:f 'x=[0,300]'" in output
    shown = finish(start(mine, "show", "r", environment={}))
    assert "(raylet) died" in shown
    assert "without a word" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--local",)])
def test_more_than_one_ctrl_c_adds_nothing_to_the_message(
    mine: Path, words: tuple[str, ...]
) -> None:
    process = begun(mine, *words)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert any(line.startswith("interrupted; finished units") for line in process.stdout)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert (process.stdout.read(), process.returncode) == ("", 130)


def files(folder: str) -> list[Path]:
    return sorted(path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_a_hundred_thousand_units_fit_in_a_gigabyte_and_in_as_many_files_as_a_hundred(
    folder: Path,
) -> None:
    Path("many.yaml").write_text("experiment: benchmarks.scaling.experiment\n")

    def peak(count: int, run: str) -> int:
        words = ("run", "many.yaml", f"work.count={count}", "work.seconds=0", "--run-dir", run)
        return run_command(words, folder / "log", {"PYTHONPATH": str(PROJECT)}).peak_bytes

    peak(100, "few")
    found = []
    for count in (100_000, 100_001):  # continuing reads what is stored
        assert peak(count, "many") < 10**9
        ledger = Ledger(RunDirectory.at("many"), writable=False)
        assert len(ledger.rows("evaluations")) == count
        found.append(files("many"))
    assert found[0] == files("few")
