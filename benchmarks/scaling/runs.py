"""Whole runs of the command with growing numbers of units: resources of driver and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.store import tables as results
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory

#: measures a command as the parent of all that it starts
_MEASURE = Path(__file__).with_name("measured_command.py")


@dataclass(frozen=True)
class Cost:
    """Resources of a command.

    ``cpu_s`` and ``peak_bytes``, its resident memory, are those of its own process; ``tree_cpu_s``
    counts all processes that it started, Ray's as well. ``cpu_by_time`` has its own CPU seconds by
    time, in seconds since the epoch.
    """

    wall_s: float
    cpu_s: float
    tree_cpu_s: float
    peak_bytes: int
    cpu_by_time: Sequence[tuple[float, float]]

    @property
    def whole(self) -> dict[str, float]:
        """Measurements of the command as a whole."""
        return {name: each for name, each in vars(self).items() if name != "cpu_by_time"}


def run_command(
    arguments: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
) -> Cost:
    """Run ``raypipe`` with the given arguments, as ``run``."""
    return run([sys.executable, "-m", "raypipe", *map(str, arguments)], log, environment)


def run(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Cost:
    """Run a command.

    Raises:
        RuntimeError: its exit status is not 0; the message has the end of its output.

    """
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    words = [sys.executable, str(_MEASURE), str(log), *command]
    done = subprocess.run(words, env=everything, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {log.read_text()[-2000:]}")
    return Cost(**json.loads(done.stdout))


def measure(text: str, only: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a configuration and then the same command again; return the resources and the files.

    Args:
        text: the configuration.
        only: the stages to run; the first has the evaluations.
        folder: an empty folder for the results.

    Raises:
        RuntimeError: a command failed, or the second one did work.

    """
    log, place, config = folder / "log", folder / "run", folder / "scale.yaml"
    config.write_text(text)
    cache = {"RAYPIPE_CACHE": str(folder / "cache")}
    chosen = [f"--only={stage}" for stage in only]
    command = ["run", str(config), "--run-dir", str(place), *chosen]
    load = os.getloadavg()[0]
    first = run_command(command, log, cache)
    again = run_command(command, log, cache)
    if "nothing to do" not in log.read_text():
        raise RuntimeError(f"the second command did something: {log.read_text()[-2000:]}")
    files = [path for path in place.rglob("*") if path.is_file()]
    run = RunDirectory.at(place)
    stages = results.read_table(run, "stages").set_index("stage")["duration_s"]
    ledger = Ledger(run, writable=False)
    return {
        "evaluations": len(ledger.rows("evaluations")),
        "load": load,
        "run": first.whole,
        "continue": again.whole,
        "per_s": len(ledger.rows("evaluations")) / stages[only[0]],
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "ledger_bytes": sum(path.stat().st_size for path in Path(run.ledger).iterdir()),
    }


def model(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the increase per evaluation between the smallest and the largest run."""
    first, last = rows[0], rows[-1]
    if first is last:
        return {}
    more: int = last["evaluations"] - first["evaluations"]

    def each(read: Any) -> float:
        return float((read(last) - read(first)) / more)

    return {
        "driver_cpu_us": 1e6 * each(lambda row: row["run"]["cpu_s"]),
        "driver_bytes": each(lambda row: row["run"]["peak_bytes"]),
        "continue_cpu_us": 1e6 * each(lambda row: row["continue"]["cpu_s"]),
        "continue_bytes": each(lambda row: row["continue"]["peak_bytes"]),
        "ledger_bytes": each(lambda row: row["ledger_bytes"]),
    }
