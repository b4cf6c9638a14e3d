"""Benchmark raypipe's overhead: against its peers, by number of units, and by number of nodes.

    python -m benchmarks.scale calls      # 4 to 10^6 calls against bare Ray tasks and joblib
    python -m benchmarks.scale looking    # commands that look at 10^4 calls, and at 200 runs
    python -m benchmarks.scale studies    # the main job with evaluations looked up in a table
    python -m benchmarks.scale nodes      # 1 to 16 simulated nodes

``calls`` runs the same calls by ``raypipe map``, as Ray tasks and by joblib, of which only raypipe
records each call durably. It compares the CPU time of all processes of a command, without what the
start costs, which the same command with four calls has. All benchmarks run commands in separate
processes and measure their peak resident memory and CPU time. Every result records the machine's
load.

Results: ``benchmarks/results/scale/``; conclusions: ``docs/scaling.md``.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.rounds import write_report
from benchmarks.scaling import calls as against_peers
from benchmarks.scaling import looking as looks
from benchmarks.scaling import nodes as simulated
from benchmarks.scaling import runs
from benchmarks.scaling import studies as made_up

OUT = Path("benchmarks/results/scale")
NODES = (1, 2, 4, 8, 16)
app = typer.Typer(add_completion=False)


@app.command()
def calls(
    rounds: Annotated[int, typer.Option(min=1, help="of each case")] = 3,
    only: Annotated[str, typer.Option(help="only cases whose name has this; others stay")] = "",
    out: Annotated[Path, typer.Option(help="folder of the results")] = OUT,
) -> None:
    """Compare commands of many calls with bare Ray tasks and joblib, alternately."""
    started = _now()
    file = out / "calls.json"
    cases: dict[str, Any] = json.loads(file.read_text())["cases"] if only else {}
    for case in against_peers.CASES:
        if only not in case.name:
            continue
        is_long = case.number > against_peers.FEW  # a second is noisy
        rows = against_peers.rounds(case, rounds if is_long else 4 * rounds)
        found = against_peers.summarize(case, rows)
        cases[case.name] = {"summary": found, "rounds": rows}
        typer.echo(
            f"{case.name}: {found['tree_cpu_s']['median']:.1f} s of CPU, "
            f"{found['cpu_s']['median']:.1f} s in the driver, {found['wall_s']['median']:.1f} s, "
            f"{found['peak_bytes']['median'] / 1e6:.0f} MB"
        )
        for peer, goal in case.goals:
            cpu, wall = found[peer]["cpu"], found[peer]["wall"]
            typer.echo(
                f"  CPU {cpu['median']:.2f} of {peer}'s ({cpu['low']:.2f} to {cpu['high']:.2f}; "
                f"goal {goal:g}), wall {wall['median']:.2f}"
            )
        _write(file, started, {"cases": cases})


@app.command()
def looking(
    number: Annotated[int, typer.Option(help="of calls")] = 10_000,
    out: Annotated[Path, typer.Option(help="folder of the results")] = OUT,
) -> None:
    """Measure the commands that show a run of many calls, or list runs."""
    started = _now()
    with TemporaryDirectory(prefix="raypipe-scale-") as name:
        found = looks.measure(number, Path(name))
    for view, cost in found.items():
        typer.echo(f"{view}: {cost['cpu_s']:.2f} s of CPU, {cost['peak_bytes'] / 1e6:.0f} MB")
    _write(out / "looking.json", started, {"calls": number, "views": found})


@app.command()
def studies(
    numbers: Annotated[list[int] | None, typer.Option(help="of evaluations, rising")] = None,
    out: Annotated[Path, typer.Option(help="folder of the results")] = OUT,
) -> None:
    """Measure the main job with growing numbers of evaluations, looked up in a table."""
    started = _now()
    rows: list[dict[str, Any]] = []
    for number in numbers or (1_000, 10_000, 100_000):
        with TemporaryDirectory(prefix="raypipe-scale-") as name:
            folder = Path(name)
            text = made_up.configuration(number, folder)
            rows.append(row := runs.measure(text, ["lda"], folder))
        cost = row["run"]
        typer.echo(
            f"{row['evaluations']} evaluations: {row['per_s']:.0f} a second, driver "
            f"{cost['peak_bytes'] / 1e6:.0f} MB and {cost['cpu_s']:.0f} s of CPU; "
            f"{row['files']} files, {row['bytes'] / 1e6:.1f} MB; continue "
            f"{row['continue']['wall_s']:.1f} s, {row['continue']['peak_bytes'] / 1e6:.0f} MB"
        )
        _write(out / "studies.json", started, {"an_evaluation": runs.model(rows), "runs": rows})


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
