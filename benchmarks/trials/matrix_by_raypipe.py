"""Trainings of a grid as a raypipe matrix, with the functions that the command calls."""

from __future__ import annotations

from pathlib import Path

from benchmarks.trials.plan import Grid
from raypipe import hardware
from raypipe.commands import configuration as config
from raypipe.commands.selection import selected
from raypipe.graph.launcher import Launcher
from raypipe.graph.progress import Display
from raypipe.graph.runner import run_stages
from raypipe.graph.scheduler import Outcomes
from raypipe.graph.session import Session
from raypipe.integrations.tracking import Trackers
from raypipe.report.page import build
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory

_YAML = """
experiment: benchmarks.trials.experiment
steps: {grid.steps}
clock: {clock}
train:
  training:
    micro_batch: {grid.micro_batch}
    accumulation: 1
    optimizer: adamw
    schedule: constant
    seed: 0
  scaling: {{workers: 1, gpus_per_worker: 0, cpus_per_worker: 1}}
  loader: {{workers: 0}}
matrix:
  axes:
    train.training.learning_rate: {rates}
    train.training.clip_norm: {norms}
  runs: {grid.runs}
"""


def run(grid: Grid, launcher: Launcher, clock: Path, folder: Path) -> list[float]:
    """Run the matrix, its tables and report, and return the last loss of each training.

    Raises:
        RuntimeError: a training failed.

    """
    rates, norms = list(grid.learning_rates), list(grid.clip_norms)
    text = _YAML.format(grid=grid, clock=clock, rates=rates, norms=norms)
    nodes = launcher.on_every_node(hardware.detect)
    configuration = config.resolve(config.parse(text, "benchmark"), (), "auto", nodes)
    graph = selected(configuration, (), nodes)
    run_dir = RunDirectory.at(folder)
    run_dir.write(run_dir.config, text.encode())
    ledger = Ledger(run_dir)
    graph.record(ledger)
    first = graph.loop(ledger).further(ledger, Outcomes(), print)
    tracked = Trackers((), run_dir, "benchmark", configuration.experiment.name, {})
    with Display() as display, tracked as trackers:
        settings = configuration.settings
        session = Session(
            run_dir, "benchmark", ledger, launcher, display, nodes, trackers, settings
        )
        failed = run_stages(first, session)
    if failed is not None:
        raise RuntimeError(failed)
    build(run_dir, "benchmark", None, "benchmark")
    points: dict[str, dict[str, float]] = {}
    for row in ledger.rows("variants"):
        points.setdefault(row["variant"], {})[row["key"]] = row["number"]
    losses = {
        (
            points[row["variant"]]["train.training.learning_rate"],
            points[row["variant"]]["train.training.clip_norm"],
            int(points[row["variant"]]["seed"]),
        ): float(row["loss_final"])
        for row in ledger.rows("trials")
    }
    return [losses[point] for point in grid.points]
