"""Benchmark the overhead of a matrix of small trainings against Ray Tune function trials.

    python -m benchmarks.matrix

Each contender runs the same 72 trainings: 24 points of learning rate and clip norm, with three
seeds. Each training has one CPU, and as many run at the same time as the machine has CPUs. They
alternate on one Ray instance of this process.

- ``raypipe``: a matrix, with the ledger, tables, models and report of a run directory,
- ``tune``: function trials with Tune's defaults, as in Ray's documentation,
- ``tune_reuse``: the same with ``reuse_actors=True``, the fastest that Tune offers.

A clock in the model measures each training, from the first forward pass to the last update. The
overhead is the wall time, from the call to the last result, without the time that the trainings
would take at that speed on all CPUs. The start of Ray is not counted. The last losses must agree in
nine of ten trainings, which shows that the contenders train the same. raypipe scales and clips
gradients in one multiplication, the other loops in two; where clipping is active and the learning
rate high, the rounding grows over the steps.

Results: ``benchmarks/results/matrix/overhead.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import ray
import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.rounds import extent, rotated, write_report
from benchmarks.training import machine
from benchmarks.trials import matrix_by_raypipe, matrix_by_tune
from benchmarks.trials.experiment import spans
from benchmarks.trials.plan import Grid
from raypipe.launch.cluster import RayLauncher

REFERENCE = "tune"
PACKAGES = ("torch", "ray", "raypipe-runner")
#: largest acceptable ratio of raypipe's overhead to the reference's
TARGET = 1 / 3
#: relative difference of last losses, and the share of trainings that may exceed it
TOLERANCE, EXCEEDING = 1e-6, 0.1

Contender = Callable[[Grid, Path, Path], list[float]]


def measure(contender: Contender, grid: Grid, cpus: int) -> tuple[dict[str, Any], list[float]]:
    """Run the trainings; return the times in seconds and the last loss of each.

    Raises:
        RuntimeError: the number of trainings is not that of the grid.

    """
    with TemporaryDirectory() as folder:
        clock, results = Path(folder, "clock"), Path(folder, "results")
        clock.mkdir()
        results.mkdir()
        begin_s = time.monotonic()
        losses = contender(grid, clock, results)
        wall_s = time.monotonic() - begin_s
        trained = spans(clock)
    if len(trained) != len(grid.points):
        raise RuntimeError(f"{len(trained)} trainings instead of {len(grid.points)}")
    training_s = sum(span.end_s - span.begin_s for span in trained)
    row = {
        "wall_s": wall_s,
        "training_s": training_s,
        "before_first_s": trained[0].begin_s - begin_s,
        "after_last_s": begin_s + wall_s - max(span.end_s for span in trained),
        "overhead_s": wall_s - training_s / cpus,
    }
    return row, losses


def run_rounds(
    contenders: dict[str, Contender], grid: Grid, cpus: int, rounds: int
) -> tuple[list[dict[str, Any]], list[float]]:
    """Return a row per round and contender, and the relative differences of all losses."""
    rows: list[dict[str, Any]] = []
    differences: list[float] = []
    names = list(contenders)
    for number in range(rounds):
        losses: dict[str, list[float]] = {}
        for name in rotated(names, number):
            row, losses[name] = measure(contenders[name], grid, cpus)
            rows.append({"round": number, "contender": name, **row})
            typer.echo(
                f"{number} {name}: {row['wall_s']:.1f} s, overhead {row['overhead_s']:.1f} s"
            )
        for found in losses.values():
            if found is not losses[REFERENCE]:
                pairs = zip(found, losses[REFERENCE], strict=True)
                differences += [abs(mine - theirs) / abs(theirs) for mine, theirs in pairs]
    return rows, differences


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and spread of each contender, and its ratios to the reference by round."""
    reference = {row["round"]: row for row in rows if row["contender"] == REFERENCE}
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        summary[name] = {
            key: extent(row[key] for row in mine)
            for key in ("overhead_s", "wall_s", "training_s", "before_first_s", "after_last_s")
        }
        summary[name]["ratio"] = extent(
            row["overhead_s"] / reference[row["round"]]["overhead_s"] for row in mine
        )
    return summary


def table(summary: dict[str, Any]) -> Table:
    """Return the summary to print."""
    title = f"overhead of 72 trainings in seconds; ratios to {REFERENCE} by round"
    shown = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("contender", no_wrap=True)
    for column in ("overhead", "lowest", "highest", "ratio", "target", "wall", "first", "end"):
        shown.add_column(column, justify="right")
    for name, entry in summary.items():
        shown.add_row(
            name,
            *(f"{value:.1f}" for value in entry["overhead_s"].values()),
            f"{entry['ratio']['median']:.3f}",
            f"{TARGET:.3f}" if name == "raypipe" else "",
            *(
                f"{entry[key]['median']:.1f}"
                for key in ("wall_s", "before_first_s", "after_last_s")
            ),
        )
    return shown


def main(
    rounds: Annotated[int, typer.Option(min=1, help="of each contender")] = 3,
    steps: Annotated[int, typer.Option(min=5, help="of a training")] = 50,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path(
        "benchmarks/results/matrix"
    ),
) -> None:
    """Measure all alternately and write the results."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    launcher, grid = RayLauncher(), Grid(steps)
    contenders: dict[str, Contender] = {
        "raypipe": lambda grid, clock, folder: matrix_by_raypipe.run(grid, launcher, clock, folder),
        REFERENCE: matrix_by_tune.run,
        "tune_reuse": partial(matrix_by_tune.run, reuse_actors=True),
    }
    try:
        cpus = int(ray.cluster_resources()["CPU"])
        rows, differences = run_rounds(contenders, grid, cpus, rounds)
    finally:
        launcher.close()
    summary = summarize(rows)
    exceeding = sum(not difference <= TOLERANCE for difference in differences) / len(differences)
    report = {
        "trainings": len(grid.points),
        "steps": steps,
        "largest_loss_difference": max(differences),
        "equal_losses": sum(difference == 0 for difference in differences) / len(differences),
        "different_losses": exceeding,
        "target": TARGET,
        "summary": summary,
        "rounds": rows,
    }
    about = machine(torch.device("cpu"), threads=1)
    write_report(out / "overhead.json", started, about, PACKAGES, **report)
    Console().print(table(summary))
    typer.echo(
        f"last losses: {report['equal_losses']:.0%} equal, {exceeding:.0%} differ by more than "
        f"{TOLERANCE:g}, the largest by {max(differences):.1e}"
    )
    if exceeding > EXCEEDING:
        typer.echo("the contenders did not train the same", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
