"""The start of Ray, where it goes wrong."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import ctypes
from raypipe.launch import cluster
cluster._START_S = 0.5
cluster.ray.init = lambda **_: ctypes.PyDLL(None).sleep(300)  # which keeps the interpreter
cluster.RayLauncher()
"""


def test_a_start_that_never_ends_ends_the_command() -> None:
    command = [sys.executable, "-c", STUCK]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert "Timeout (0:00:00.500000)!" in ended.stderr
    assert "raypipe/launch/cluster.py" in ended.stderr
