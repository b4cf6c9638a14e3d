"""Many units in one run."""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from tests.command import EXAMPLES, start


@pytest.fixture
def many(tmp_path: Path) -> Path:
    shutil.copy(EXAMPLES / "example_many.py", tmp_path / "many.py")
    (tmp_path / "many.yaml").write_text("experiment: many\n")
    return tmp_path


def run_watched(folder: Path, *arguments: str | Path) -> int:
    """The most resident memory, in bytes, of the command's own process."""
    command = start(folder, "run", "many.yaml", *arguments, environment={})
    peak, status = 0, Path(f"/proc/{command.pid}/status")
    try:
        while command.poll() is None:
            found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
            peak = max(peak, int(found[1]) * 1024 if found else 0)
            time.sleep(0.05)
        assert command.returncode == 0, command.stdout.read()
    finally:
        command.kill()
        command.wait()
        command.stdout.close()
    return peak


def ledger(folder: Path) -> Ledger:
    return Ledger(RunDirectory.at(folder), writable=False)


def files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_a_hundred_thousand_units_fit_in_a_gigabyte_and_in_as_many_files_as_a_hundred(many: Path):
    run_watched(many, "work.count=100", "--run-dir", "few")
    assert run_watched(many, "work.count=100000", "--run-dir", "many") < 10**9
    assert files(many / "many") == files(many / "few")
    assert len(ledger(many / "many").rows("evaluations")) == 100_000
    # continuing reads what is stored
    assert run_watched(many, "work.count=100001", "--run-dir", "many") < 10**9
    assert len(ledger(many / "many").rows("evaluations")) == 100_001
