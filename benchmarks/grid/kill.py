"""Kill each tool in the middle of the grid, run the same command again, and count the calls.

Run as ``python -m benchmarks.grid.kill [TOOL ...]`` from the repository root, with the extra
``bench`` installed. Every call sleeps for a second and writes a line. A command is killed by
SIGKILL after some lines. Processes that it leaves have five seconds, and what they add is counted;
then they are killed, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

PROJECT = Path(__file__).resolve().parents[2]
ARGUMENTS = ["C=0.1,1,10", "seed=0,1,2,3,4"]
TOOLS = {
    "ray": ["with_ray"],
    "tune": ["with_tune"],
    "joblib": ["with_joblib"],
    "optuna": ["with_optuna"],
    "submitit": ["with_submitit"],
    "hydra": ["with_hydra", "--multirun", "hydra/launcher=joblib", *ARGUMENTS],
}
RAYPIPE = ["map", "benchmarks.grid.score:score", "C=[0.1,1,10]", "seed=0..4", "--run-dir", "out"]
KILLED_AFTER = 6


def main() -> None:
    """Print an outcome per tool as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=[*TOOLS, "raypipe"])
    for tool in parser.parse_args().tools:
        print(json.dumps(measure(tool)), flush=True)


def measure(tool: str) -> dict[str, Any]:
    """Kill a tool after some calls, run it again, and count.

    ``left`` are calls that ended in the five seconds after the kill, in processes that it left, and
    ``repeated`` the calls that ran more than once.
    """
    with tempfile.TemporaryDirectory(prefix="grid-") as name:
        folder = Path(name)
        log = folder / "calls.txt"
        log.touch()
        first = _start(tool, folder)
        while len(_calls(log)) < KILLED_AFTER and first.poll() is None:
            time.sleep(0.05)
        before = len(_calls(log))
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        time.sleep(5)
        left = len(_calls(log)) - before
        for process in _left(folder):
            process.kill()
        second = _start(tool, folder)
        status = second.wait(timeout=300)
        for process in _left(folder):
            process.kill()
        ran = Counter(_calls(log))
        return {
            "tool": tool,
            "before": before,
            "left": left,
            "again": ran.total() - before - left,
            "repeated": sum(count > 1 for count in ran.values()),
            "status": status,
        }


def _command(tool: str) -> list[str]:
    if tool == "raypipe":
        return [sys.executable, "-m", "raypipe", *RAYPIPE]
    script, *arguments = TOOLS[tool]
    return [sys.executable, "-m", f"benchmarks.grid.{script}", *arguments]


def _start(tool: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "GRID_LOG": str(folder / "calls.txt"),
        "GRID_SLEEP_S": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            _command(tool), cwd=folder, env=environment, stdout=output, stderr=output
        )


def _left(folder: Path) -> Iterator[psutil.Process]:
    """Yield the processes of the tool that are alive: those with its log in the environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("GRID_LOG") == str(folder / "calls.txt"):
                yield process
        except psutil.Error:
            continue


def _calls(log: Path) -> list[str]:
    return log.read_text().splitlines()


if __name__ == "__main__":
    main()
