"""The list of code that no test executes without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

from tests.gpu.gpu_lines import gpu_lines

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "gpu_coverage.md"


def test_the_page_names_functions_that_need_a_gpu() -> None:
    rows = re.findall(r"^\| `(raypipe/\S+)` \| `([\w.]+)`", PAGE.read_text(), re.MULTILINE)
    assert rows
    needing = {(line.file, line.function) for line in gpu_lines()}
    assert set(rows) <= needing


def test_conditions_and_calls_decide_what_needs_a_gpu() -> None:
    found = {(line.file, line.function) for line in gpu_lines()}
    assert ("raypipe/training/nvml.py", "Gpu.values") in found  # calls of NVML
    assert ("raypipe/training/throughput.py", "Throughput._mark") in found  # after a return
    assert ("raypipe/training/history.py", "History.note") in found  # is_cuda
    assert ("raypipe/training/history.py", "History.settle") not in found
