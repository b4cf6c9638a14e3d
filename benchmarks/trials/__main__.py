"""Benchmark the overhead per training of raypipe's sweeps and matrices against Ray Tune.

    python -m benchmarks.trials sweep [--workers 2]
    python -m benchmarks.trials matrix
    python -m benchmarks.trials local

Contenders run the same trainings (model, samples, seeds, steps, settings) in alternation, on one
Ray instance of this process:

- ``raypipe``: the command, with ledger, tables and report of a run directory,
- ``tune``: of a sweep, a Tune function that runs a TorchTrainer, as in Ray's guide, one trial at a
  time; of a matrix, function trials with Tune's defaults, as many at a time as there are CPUs,
- ``tune_reuse``: of a matrix, the same with ``reuse_actors=True``, the fastest that Tune offers.

A clock in the model measures each training, from the first forward pass to the last update. The
overhead is the wall time, from the call to the last result, without the time that the trainings
would take at that speed side by side. A sweep's is also measured between trainings: from the last
update of one to the first forward pass of the next. The start of Ray is not counted. The last
losses must agree in nine of ten trainings, which shows that the contenders train the same. raypipe
scales and clips gradients in one multiplication, the other loops in two; where clipping is active
and the learning rate high, the rounding grows over the steps.

``local`` compares a matrix of small trainings without Ray with a hand-written loop: the CPU time of
each training after the first.

Results: ``benchmarks/results/trials/<study>.json``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import pandas as pd
import ray
import typer

from benchmarks.rounds import extent, rotated, write_report
from benchmarks.trials import by_ray, by_raypipe
from benchmarks.trials.experiment import Contender, Study, matrix_of, seeds_of, spans, sweep_of
from raypipe.launch.cluster import RayLauncher

REFERENCE = "tune"
PACKAGES = ("torch", "ray", "raypipe-runner")
#: relative difference of last losses, and the share of trainings that may exceed it
TOLERANCE, EXCEEDING = 1e-4, 0.1
TIMES = ("overhead_s", "between_s", "wall_s", "before_first_s", "after_last_s", "training_s")
OUT = Path("benchmarks/results/trials")
Rounds = Annotated[int, typer.Option(min=1, help="of each contender")]
Steps = Annotated[int, typer.Option(min=5, help="of a training")]
Out = Annotated[Path, typer.Option(help="folder of the results")]
app = typer.Typer(add_completion=False)


def measure(contender: Contender, study: Study, cpus: int) -> tuple[dict[str, float], list[float]]:
    """Run the trainings; return times in seconds, and the last loss of each.

    Raises:
        RuntimeError: the number of trainings is not that of the study.

    """
    with TemporaryDirectory() as folder:
        clock, results = Path(folder, "clock"), Path(folder, "results")
        clock.mkdir()
        results.mkdir()
        begin_s, cpu_s = time.monotonic(), time.process_time()
        losses = contender(study, clock, results)
        end_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
        trained = spans(clock)
    if len(trained) != len(study.points):
        raise RuntimeError(f"{len(trained)} trainings instead of {len(study.points)}")
    training_s = [span.end_s - span.begin_s for span in trained]
    row = {
        "wall_s": end_s - begin_s,
        "cpu_s": cpu_s,
        "training_s": fmean(training_s),
        "before_first_s": trained[0].begin_s - begin_s,
        "after_last_s": end_s - max(span.end_s for span in trained),
        "overhead_s": end_s - begin_s - sum(training_s) / (cpus if study.side_by_side else 1),
    }
    if not study.side_by_side:
        gaps = [after.begin_s - before.end_s for before, after in pairwise(trained)]
        row["between_s"] = median(gaps)
    return row, losses


def compare(study: Study, contenders: Mapping[str, Contender], rounds: int, out: Path) -> None:
    """Measure all contenders in alternation, write the results and print their summary."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    rows: list[dict[str, Any]] = []
    differences: list[float] = []
    cpus = int(ray.cluster_resources()["CPU"])
    for number in range(rounds):
        losses: dict[str, list[float]] = {}
        for name in rotated(list(contenders), number):
            row, losses[name] = measure(contenders[name], study, cpus)
            rows.append({"round": number, "contender": name, **row})
            typer.echo(
                f"{number} {name}: {row['wall_s']:.1f} s, overhead {row['overhead_s']:.1f} s"
            )
        for found in losses.values():
            if found is not losses[REFERENCE]:
                pairs = zip(found, losses[REFERENCE], strict=True)
                differences += [abs(mine - theirs) / abs(theirs) for mine, theirs in pairs]
    summary = summarize(rows)
    exceeding = sum(not each <= TOLERANCE for each in differences) / len(differences)
    report = {
        "trainings": len(study.points),
        "steps": study.steps,
        "largest_loss_difference": max(differences),
        "different_losses": exceeding,
        "summary": summary,
        "rounds": rows,
    }
    write_report(out / f"{study.name}.json", started, PACKAGES, **report)
    typer.echo(f"{study.name}: seconds of {len(study.points)} trainings; ratios to {REFERENCE}")
    typer.echo(table(summary).to_string())
    typer.echo(
        f"last losses: {exceeding:.0%} differ by more than {TOLERANCE:g}, the largest by "
        f"{max(differences):.1e}"
    )
    if exceeding > EXCEEDING:
        typer.echo("the contenders did not train the same", err=True)
        raise typer.Exit(1)


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return median and spread of the times of each contender, and of its ratios by round."""
    reference = {row["round"]: row for row in rows if row["contender"] == REFERENCE}
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == name]
        known = [key for key in TIMES if key in own[0]]
        summary[name] = {key: extent(row[key] for row in own) for key in known}
        for key in known[: known.index("wall_s")]:
            ratios = [row[key] / reference[row["round"]][key] for row in own]
            summary[name][f"{key} / {REFERENCE}"] = extent(ratios)
    return summary


def table(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Return the summary to print: medians, with the range of the ratios."""
    return pd.DataFrame(
        {
            name: {
                key.removesuffix("_s"): f"{of['median']:.3g} ({of['low']:.3g} to {of['high']:.3g})"
                for key, of in found.items()
            }
            for name, found in summary.items()
        }
    )


@app.command()
def sweep(
    trials: Annotated[int, typer.Option(min=2, help="of a sweep")] = 4,
    workers: Annotated[int, typer.Option(min=1, help="of a trial")] = 1,
    rounds: Rounds = 3,
    steps: Steps = 50,
    out: Out = OUT,
) -> None:
    """Compare a sweep, one trial at a time."""
    launcher = RayLauncher()
    try:
        contenders = {"raypipe": by_raypipe.sweep, REFERENCE: by_ray.sweep}
        compare(sweep_of(trials, workers, steps), contenders, rounds, out)
    finally:
        launcher.close()


@app.command()
def matrix(rounds: Rounds = 3, steps: Steps = 50, out: Out = OUT) -> None:
    """Compare 72 trainings: 24 points of learning rate and clip norm, with three seeds."""
    launcher = RayLauncher()
    try:
        contenders = {
            "raypipe": by_raypipe.matrix,
            REFERENCE: by_ray.matrix,
            "tune_reuse": by_ray.matrix_in_reused_actors,
        }
        compare(matrix_of(steps), contenders, rounds, out)
    finally:
        launcher.close()


@app.command()
def local(further: int = 12, rounds: Rounds = 3, steps: Steps = 300, out: Out = OUT) -> None:
    """Compare the CPU time of further trainings without Ray with a hand-written loop."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    contenders: dict[str, Contender] = {
        "raypipe": partial(by_raypipe.matrix, local=True),
        "by_hand": by_ray.by_hand,
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in rotated(list(contenders), number):
            studies = seeds_of(1, steps), seeds_of(1 + further, steps)
            one, all_s = (measure(contenders[name], each, 1)[0]["cpu_s"] for each in studies)
            found[name].append((all_s - one) / further)
    ratios = extent(mine / hand for mine, hand in zip(*found.values(), strict=True))
    write_report(out / "local.json", started, PACKAGES, training_cpu_s=found, ratio=ratios)
    typer.echo(f"CPU seconds of each further training: {found}; ratio {ratios}")


if __name__ == "__main__":
    app()
