"""Benchmark the overhead per trial of raypipe's sweeps against plain Ray Tune.

    python -m benchmarks.sweep

Two contenders run the same trials (model, samples, seeds, steps, settings), one trial at a time.
They alternate on one Ray instance of this process. ``raypipe`` runs a sweep as its command does,
with the ledger, tables and recommendation of a run directory; ``plain_ray`` is a Tune function
that runs a TorchTrainer, as in Ray's guide. A clock in the model measures each training, from the
first forward pass to the last update. The benchmark compares the time between trainings, from the
last update of one trial to the first forward pass of the next.

Three times are reported separately: before the first training (for raypipe, the start of the actor
that later trials reuse), after the last training, and the wall time of a whole sweep without its
trainings, per trial. The start of Ray is not counted. The last losses must agree, which shows that
both contenders train the same.

Results: ``benchmarks/results/sweep/trials.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.rounds import extent, rotated, write_report
from benchmarks.training import machine
from benchmarks.trials import by_ray, by_raypipe
from benchmarks.trials.experiment import spans
from benchmarks.trials.plan import Plan
from raypipe.launch.cluster import RayLauncher

REFERENCE = "plain_ray"
CONTENDERS = ("raypipe", REFERENCE)
PACKAGES = ("torch", "ray", "raypipe-runner")
#: largest acceptable ratio to the reference's time, by number of workers
TARGETS = {1: 0.1, 2: 0.6}
TOLERANCE = 1e-4

Contender = Callable[[Plan, Path, Path], list[float]]


def measure(contender: Contender, plan: Plan) -> tuple[dict[str, Any], list[float]]:
    """Run one sweep; return its times in seconds and the last loss of each trial.

    Raises:
        RuntimeError: the number of trainings is not the number of trials.

    """
    with TemporaryDirectory() as folder:
        clock, results = Path(folder, "clock"), Path(folder, "results")
        clock.mkdir()
        results.mkdir()
        begin_s = time.monotonic()
        losses = contender(plan, clock, results)
        end_s = time.monotonic()
        trained = spans(clock)
    if len(trained) != plan.trials:
        raise RuntimeError(f"{len(trained)} trainings instead of {plan.trials}")
    training_s = [span.end_s - span.begin_s for span in trained]
    row = {
        "wall_s": end_s - begin_s,
        "training_s": training_s,
        "before_first_s": trained[0].begin_s - begin_s,
        "between_s": [after.begin_s - before.end_s for before, after in pairwise(trained)],
        "after_last_s": end_s - trained[-1].end_s,
        "rest_per_trial_s": (end_s - begin_s - sum(training_s)) / plan.trials,
    }
    return row, losses


def run_rounds(
    contenders: dict[str, Contender], plan: Plan, rounds: int
) -> tuple[list[dict[str, Any]], float]:
    """Return a row per round and contender, and the largest relative difference of a loss."""
    rows: list[dict[str, Any]] = []
    difference = 0.0
    for number in range(rounds):
        losses: dict[str, list[float]] = {}
        for name in rotated(CONTENDERS, number):
            row, losses[name] = measure(contenders[name], plan)
            rows.append({"round": number, "contender": name, **row})
            typer.echo(
                f"{plan.workers} worker(s), {number} {name}: {median(row['between_s']):.2f} s "
                f"between trials, the whole {row['wall_s']:.1f} s"
            )
        for name in CONTENDERS:
            for mine, theirs in zip(losses[name], losses[REFERENCE], strict=True):
                difference = max(difference, abs(mine - theirs) / abs(theirs))
    return rows, difference


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and spread of each contender, and its ratios to the reference by round."""
    reference = {row["round"]: row for row in rows if row["contender"] == REFERENCE}
    summary: dict[str, Any] = {}
    for name in CONTENDERS:
        mine = [row for row in rows if row["contender"] == name]
        between = [gap for row in mine for gap in row["between_s"]]
        summary[name] = {
            "between_s": extent(between),
            "ratio": extent(
                median(row["between_s"]) / median(reference[row["round"]]["between_s"])
                for row in mine
            ),
            "ratio_of_whole": extent(
                row["rest_per_trial_s"] / reference[row["round"]]["rest_per_trial_s"]
                for row in mine
            ),
            **{
                key: extent(row[key] for row in mine)
                for key in ("before_first_s", "after_last_s", "rest_per_trial_s", "wall_s")
            },
            "training_s": extent(seconds for row in mine for seconds in row["training_s"]),
        }
    return summary


def table(summaries: dict[int, dict[str, Any]]) -> Table:
    """Return the summary to print."""
    title = f"overhead per trial in seconds: medians; ratios to {REFERENCE} by round"
    shown = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("contender", no_wrap=True)
    columns = (
        "workers",
        "per trial",
        "lowest",
        "highest",
        "ratio",
        "target",
        "whole sweep",
        "ratio",
    )
    for column in columns:
        shown.add_column(column, justify="right")
    for workers, summary in summaries.items():
        for name, entry in summary.items():
            shown.add_row(
                name,
                str(workers),
                *(f"{value:.2f}" for value in entry["between_s"].values()),
                f"{entry['ratio']['median']:.3f}",
                "" if name == REFERENCE else f"{TARGETS[workers]}",
                f"{entry['rest_per_trial_s']['median']:.2f}",
                f"{entry['ratio_of_whole']['median']:.3f}",
            )
    return shown


def main(
    trials: Annotated[int, typer.Option(min=2, help="of a sweep")] = 4,
    rounds: Annotated[int, typer.Option(min=0, help="sweeps of each, one worker per trial")] = 3,
    rounds_of_two: Annotated[int, typer.Option(min=0, help="two workers per trial")] = 2,
    steps: Annotated[int, typer.Option(min=5, help="of a training")] = 50,
    out: Annotated[Path, typer.Option(help="folder of the results")] = Path(
        "benchmarks/results/sweep"
    ),
) -> None:
    """Measure both alternately and write the results."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    launcher = RayLauncher()
    contenders: dict[str, Contender] = {
        "raypipe": lambda plan, clock, folder: by_raypipe.run(plan, launcher, clock, folder),
        REFERENCE: by_ray.run,
    }
    measured: dict[int, Any] = {}
    worst = 0.0
    try:
        for workers, times in ((1, rounds), (2, rounds_of_two)):
            if times:
                plan = Plan(workers, trials, steps)
                rows, difference = run_rounds(contenders, plan, times)
                measured[workers] = {"summary": summarize(rows), "rounds": rows}
                worst = max(worst, difference)
    finally:
        launcher.close()
    summaries = {workers: entry["summary"] for workers, entry in measured.items()}
    report = {
        "trials": trials,
        "steps": steps,
        "micro_batch": Plan.micro_batch,
        "largest_loss_difference": worst,
        "targets": TARGETS,
        "workers": measured,
    }
    about = machine(torch.device("cpu"), threads=1)
    write_report(out / "trials.json", started, about, PACKAGES, **report)
    Console().print(table(summaries))
    typer.echo(f"largest relative difference of a last loss: {worst:.1e}")
    if not worst <= TOLERANCE:
        typer.echo(f"above {TOLERANCE}: the contenders did not train the same", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
