"""Benchmark raypipe's overhead: against bare Ray, by number of units, and by number of nodes.

    python -m benchmarks.scale overhead   # raypipe against bare Ray tasks
    python -m benchmarks.scale units      # 10^3 to 10^5 units, through the command
    python -m benchmarks.scale studies    # the main job with evaluations looked up in a table
    python -m benchmarks.scale nodes      # 1 to 16 simulated nodes

``overhead`` runs the same units as Ray tasks that record nothing, and as a stage of an experiment
that records each unit durably. They alternate in random order in this process, on one Ray instance.
Units sleep for 100 ms, use the CPU for 100 ms, or do nothing, on a quarter of a CPU or a whole one.
The other benchmarks run the command in a separate process and measure its peak resident memory, its
CPU time and the files that it leaves. Every result records the machine's load.

Results: ``benchmarks/results/scale/``; conclusions: ``docs/scaling.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.rounds import write_report
from benchmarks.scaling import nodes as simulated
from benchmarks.scaling import overhead as against_ray
from benchmarks.scaling import runs
from benchmarks.scaling import studies as made_up
from benchmarks.scaling.overhead import OURS, REFERENCE, Case
from raypipe.launch.cluster import RayLauncher

OUT = Path("benchmarks/results/scale")
GOAL = 0.9
CASES = (
    Case("sleep", 0.25, 160),
    Case("sleep", 1.0, 40),
    Case("spin", 0.25, 40),
    Case("spin", 1.0, 40),
    Case("noop", 0.25, 2000),
    Case("noop", 1.0, 2000),
)
NUMBERS = (1_000, 10_000, 100_000)
NODES = (1, 2, 4, 8, 16)
app = typer.Typer(add_completion=False)


@app.command()
def overhead(
    rounds: Annotated[int, typer.Option(min=2, help="of each case")] = 15,
    only: Annotated[str, typer.Option(help="only cases of that kind")] = "",
    seed: Annotated[int, typer.Option(help="of the order of the contenders")] = 0,
    out: Annotated[Path, typer.Option(help="folder of the results")] = OUT,
) -> None:
    """Compare the pool and the ledger with bare Ray tasks, alternately, in this process."""
    started = _now()
    launcher = RayLauncher()
    cases: dict[str, Any] = {}
    try:
        for case in CASES:
            if only and case.kind != only:
                continue
            rows = against_ray.run_rounds(case, launcher, rounds, seed)
            summary = against_ray.summarize(rows)
            cases[case.name] = {"units": case.units, "summary": summary, "rounds": rows}
            ratio, rate = summary["ratio"], summary[OURS]["units_per_s"]["median"]
            typer.echo(
                f"{case.name}: {ratio['median']:.3f} of bare Ray's rate "
                f"({ratio['low']:.3f} to {ratio['high']:.3f}), {rate:.0f} units/s against "
                f"{summary[REFERENCE]['units_per_s']['median']:.0f}; driver CPU "
                f"{summary[OURS]['driver_cpu_us_per_unit']['median']:.0f} us a unit against "
                f"{summary[REFERENCE]['driver_cpu_us_per_unit']['median']:.0f}"
            )
            _write(out / "overhead.json", started, {"goal": GOAL, "cases": cases})
    finally:
        launcher.close()


@app.command()
def units(
    numbers: Annotated[list[int] | None, typer.Option(help="of units, rising")] = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = OUT,
) -> None:
    """Measure the command with growing numbers of units that do nothing."""

    def configuration(number: int, folder: Path) -> str:
        del folder
        return f"experiment: benchmarks.scaling.experiment\nwork: {{count: {number}}}\n"

    _grow(numbers, configuration, ["units", "summary"], out / "units.json")


@app.command()
def studies(
    numbers: Annotated[list[int] | None, typer.Option(help="of evaluations, rising")] = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = OUT,
) -> None:
    """Measure the main job with growing numbers of evaluations, looked up in a table."""
    _grow(numbers, made_up.configuration, ["lda"], out / "studies.json")


def _grow(
    numbers: list[int] | None,
    configuration: Callable[[int, Path], str],
    stages: list[str],
    file: Path,
) -> None:
    started = _now()
    rows: list[dict[str, Any]] = []
    for number in numbers or NUMBERS:
        with TemporaryDirectory(prefix="raypipe-scale-") as name:
            folder = Path(name)
            rows.append(row := runs.measure(configuration(number, folder), stages, folder))
        cost = row["run"]
        typer.echo(
            f"{row['evaluations']} evaluations: {row['per_s']:.0f} a second, driver "
            f"{cost['peak_bytes'] / 1e6:.0f} MB and {cost['cpu_s']:.0f} s of CPU; "
            f"{row['files']} files, {row['bytes'] / 1e6:.1f} MB; continue "
            f"{row['continue']['wall_s']:.1f} s, {row['continue']['peak_bytes'] / 1e6:.0f} MB"
        )
        _write(file, started, {"an_evaluation": runs.model(rows), "runs": rows})


@app.command()
def nodes(
    numbers: Annotated[list[int] | None, typer.Option(help="of nodes")] = None,
    cpus: Annotated[int, typer.Option(min=1, help="logical ones, of a node")] = 2,
    seconds: Annotated[float, typer.Option(help="that a unit sleeps")] = 1.0,
    waves: Annotated[int, typer.Option(min=4, help="units for each CPU")] = 40,
    out: Annotated[Path, typer.Option(help="folder of the results")] = OUT,
) -> None:
    """Measure growing numbers of simulated nodes with the same work per CPU."""
    started = _now()
    rows: list[dict[str, Any]] = []
    for number in numbers or NODES:
        rows.append(row := simulated.measure(number, cpus, seconds, waves))
        typer.echo(
            f"{number} nodes, {row['nodes_used']} used: {row['rate']:.1f} units/s of "
            f"{row['ideal']:.1f}, {row['ratio']:.3f}, bare Ray {row['rate_of_bare_ray']:.1f}; "
            f"driver {row['driver']['peak_bytes'] / 1e6:.0f} MB, "
            f"{row['driver_cpu_us_per_unit']:.0f} us of CPU a unit, load {row['load']:.0f}"
        )
        _write(out / "nodes.json", started, {"clusters": rows})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write(file: Path, started: str, found: dict[str, Any]) -> None:
    load = os.getloadavg()
    write_report(file, started, ("ray", "raypipe-runner"), load_at_the_end=load, **found)


if __name__ == "__main__":
    app()
