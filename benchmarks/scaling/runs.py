"""Whole runs of the command with growing numbers of units: resources of driver and files."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.store import tables as results
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory

#: seconds between samples, and those in which processes that a command left may end
_SAMPLE_S, _LEFT_S = 0.05, 10.0
#: the parts of a second in which Linux counts the CPU time of a process
_TICKS = os.sysconf("SC_CLK_TCK")
#: variable that names the command which a process belongs to
_MARK = "RAYPIPE_BENCHMARK"


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
    cpu_by_time: tuple[tuple[float, float], ...]

    @property
    def whole(self) -> dict[str, float]:
        """Measurements of the command as a whole."""
        names = ("wall_s", "cpu_s", "tree_cpu_s", "peak_bytes")
        return {name: getattr(self, name) for name in names}


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
    mark = f"{_MARK}={log}"  # in the environment of all that the command starts
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), _MARK: str(log)}
    clock = time.perf_counter()
    own: list[tuple[float, float]] = [(time.time(), 0.0)]
    cpu, found = dict[int, float](), dict[int, float]()
    peak, wall, end = 0, None, math.inf
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=everything)
        while wall is None or (found and time.monotonic() < end):  # Ray's processes end later
            found = _cpu_of_processes(mark)
            cpu |= found
            with suppress(FileNotFoundError, ProcessLookupError):
                peak = max(peak, _peak(Path(f"/proc/{process.pid}/status").read_text()))
            own.append((time.time(), cpu.get(process.pid, 0.0)))
            time.sleep(_SAMPLE_S)
            if wall is None and process.poll() is not None:
                wall, end = time.perf_counter() - clock, time.monotonic() + _LEFT_S
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}: {log.read_text()[-2000:]}")
    return Cost(wall, own[-1][1], sum(cpu.values()), peak, tuple(own))


def _cpu_of_processes(mark: str) -> dict[int, float]:
    """Return the CPU seconds of each process by its ID that has a mark in its environment."""
    cpu: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
                cpu[int(folder.name)] = (int(user) + int(system)) / _TICKS
    return cpu


def _peak(status: str) -> int:
    """Return the peak resident memory of a process so far; 0 if it has ended."""
    line = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


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
    clock = time.perf_counter()
    ledger = Ledger(run, writable=False)
    opened = time.perf_counter()
    results.write_tables(RunDirectory.at(folder / "copy"), ledger, {}, "copy")
    written = time.perf_counter()
    return {
        "evaluations": len(ledger.rows("evaluations")),
        "load": load,
        "run": first.whole,
        "continue": again.whole,
        "per_s": len(ledger.rows("evaluations")) / stages[only[0]],
        "stages_s": stages.to_dict(),
        "open_ledger_s": opened - clock,
        "write_tables_s": written - opened,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "ledger_bytes": sum(path.stat().st_size for path in Path(run.ledger).iterdir()),
        "cache_bytes": sum(p.stat().st_size for p in (folder / "cache").rglob("*.sqlite")),
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
        "open_ledger_us": 1e6 * each(lambda row: row["open_ledger_s"]),
        "write_tables_us": 1e6 * each(lambda row: row["write_tables_s"]),
    }
