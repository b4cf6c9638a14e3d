"""The list of code that no test executes without a GPU, and the scripts that measure it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gpu.gpu_lines import gpu_lines

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "gpu_coverage.md"
RIG = Path(__file__).parent / "gpu" / "rig"


def test_the_page_names_functions_that_need_a_gpu() -> None:
    rows = re.findall(r"^\| `(raypipe/\S+)` \| `([\w.]+)`", PAGE.read_text(), re.MULTILINE)
    assert rows
    needing = {(line.file, line.function) for line in gpu_lines()}
    assert set(rows) <= needing


def test_conditions_and_calls_decide_what_needs_a_gpu() -> None:
    found = {(line.file, line.function) for line in gpu_lines()}
    assert ("raypipe/training/nvml.py", "NvmlGpu.values") in found  # calls of NVML
    assert ("raypipe/training/throughput.py", "Throughput._mark") in found  # after a return
    assert ("raypipe/training/history.py", "History.note") in found  # is_cuda
    assert ("raypipe/training/history.py", "History.settle") not in found


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


@pytest.mark.parametrize("tools", [(), ("nm",)])
def test_lines_are_not_counted_where_the_tests_cannot_run(
    tmp_path: Path, tools: tuple[str, ...]
) -> None:
    for name in ("bash", "dirname", "realpath", "mktemp", "rm"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    for name in tools:
        executable(tmp_path / name, "#!/bin/bash\n")
    call = [str(RIG / "coverage.sh"), str(tmp_path / "environment")]
    environment = {"PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(call, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "tests on fake cards skipped: gcc is not installed", "nothing is counted without them"
    ]  # fmt: skip


@pytest.mark.parametrize("complete", [False, True])
def test_an_environment_for_fake_cards_is_completed(tmp_path: Path, complete: bool) -> None:
    """As one that was made before torchao was needed."""
    log = tmp_path / "log"
    python = f"""#!/bin/bash
echo "$@" >> {log}
[[ "$*" != *torchao* ]] || exit {0 if complete else 1}
"""
    executable(tmp_path / "environment" / "bin" / "python", python)
    for name in ("gcc", "nm"):
        executable(tmp_path / "bin" / name, "#!/bin/bash\n")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    call = [str(RIG / "lane.sh"), str(tmp_path / "environment"), "--quiet"]
    subprocess.run(call, env={"PATH": path}, check=True)
    calls = log.read_text().splitlines()
    assert ("-m pip install --quiet -e .[test,fp8]" in calls) is not complete
    assert calls[-1] == "-m pytest -m gpu_rig -rs tests/gpu --quiet"
