"""Commands of many calls of a function: raypipe's against bare Ray tasks and joblib's processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.rounds import extent, rotated
from benchmarks.scaling.runs import Cost, run

#: what a start costs is measured with this many calls
FEW = 4


@dataclass(frozen=True)
class CallCase:
    """Calls of a function; for each peer, the goal for raypipe's CPU time divided by the peer's.

    Of a few calls it is the time of the whole command, of many that without what the start takes.
    """

    function: str
    number: int
    goals: tuple[tuple[str, float], ...] = ()
    local: bool = False

    @property
    def name(self) -> str:
        """Name in the results."""
        return f"{self.number:,} x {self.function}" + " --local" * self.local


CASES = (
    CallCase("empty", FEW, (("ray", 1.15),)),
    CallCase("empty", FEW, (("joblib", 1.5),), local=True),
    CallCase("empty", 10_000, (("ray", 0.05),)),
    CallCase("busy_1ms", 10_000, (("ray", 0.5), ("joblib", 1.6))),
    CallCase("busy_10ms", 1_000, (("joblib", 1.15),)),
    CallCase("empty", 100_000, (("joblib", 2.5),)),  # fewer take less than starts vary
    CallCase("empty", 1_000_000),
)


def measure(contender: str, case: CallCase, number: int) -> Cost:
    """Run the calls as a separate command, in a new folder.

    Raises:
        RuntimeError: the command failed.

    """
    with TemporaryDirectory(prefix="raypipe-calls-") as name:
        words = ["-m", "benchmarks.scaling.peers", contender, case.function, str(number)]
        if contender == "raypipe":
            reference = f"benchmarks.scaling.functions:{case.function}"
            place = ["--run-dir", f"{name}/run", *["--local"] * case.local]
            words = ["-m", "raypipe", "map", reference, f"number=0..{number - 1}", *place]
        return run([sys.executable, *words], Path(name, "log"))


def rounds(case: CallCase, number: int) -> list[dict[str, Any]]:
    """Measure a number of rounds; return a row per contender of each, which begin in turn."""
    rows: list[dict[str, Any]] = []
    names = ["raypipe", *(peer for peer, _ in case.goals)]
    for each in range(number):
        for name in rotated(names, each):
            few = measure(name, case, FEW) if case.number > FEW else None
            cost, load = measure(name, case, case.number), os.getloadavg()[0]
            cpu = cost.tree_cpu_s - (few.tree_cpu_s if few is not None else 0.0)
            rows.append(
                {"round": each, "contender": name, "load": load, "calls_cpu_s": cpu, **cost.whole}
            )
    return rows


def summarize(case: CallCase, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return raypipe's resources, and the ratios of the CPU times of a round by peer."""
    of = {(row["round"], row["contender"]): row for row in rows}
    mine = [row for row in rows if row["contender"] == "raypipe"]
    found: dict[str, Any] = {
        key: extent(row[key] for row in mine)
        for key in ("wall_s", "cpu_s", "tree_cpu_s", "calls_cpu_s", "peak_bytes")
    }
    for peer, goal in case.goals:
        pairs = [(row, of[row["round"], peer]) for row in mine]
        ratios = (row["calls_cpu_s"] / other["calls_cpu_s"] for row, other in pairs)
        found[peer] = {"goal": goal, "cpu": extent(ratios)}
        found[peer]["wall"] = extent(row["wall_s"] / other["wall_s"] for row, other in pairs)
    return found
