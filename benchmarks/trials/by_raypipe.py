"""Trials as a raypipe sweep, with the functions that the command calls."""

from __future__ import annotations

from pathlib import Path

from benchmarks.trials.plan import Plan
from raypipe import hardware
from raypipe.commands import configuration as config
from raypipe.graph.experiment import with_needs
from raypipe.graph.launcher import Launcher
from raypipe.graph.progress import Display
from raypipe.graph.runner import run_stages
from raypipe.graph.session import Session
from raypipe.integrations.tracking import Trackers
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.study.sweep_stage import NAME, with_sweep

_YAML = """
experiment: benchmarks.trials.experiment
steps: {plan.steps}
clock: {clock}
train:
  training:
    micro_batch: {plan.micro_batch}
    accumulation: 1
    learning_rate: {plan.learning_rate}
    clip_norm: {plan.clip_norm}
    optimizer: adamw
    schedule: constant
  scaling: {{workers: {plan.workers}, gpus_per_worker: 0}}
  loader: {{workers: 0}}
sweep:
  stage: train
  kind: systems
  concurrent: 1
  warmup_steps: {warmup}
  steps: {measured}
  repeats: 1
  axes: {{training.seed: {seeds}}}
"""


def run(plan: Plan, launcher: Launcher, clock: Path, folder: Path) -> list[float]:
    """Run the sweep and return the last loss of each seed.

    Raises:
        RuntimeError: a trial failed.

    """
    warmup = plan.steps // 5
    text = _YAML.format(
        plan=plan, clock=clock, warmup=warmup, measured=plan.steps - warmup, seeds=plan.seeds
    )
    nodes = launcher.on_every_node(hardware.detect)
    configuration = config.resolve(config.parse(text, "benchmark"), (), "auto", nodes)
    stages = with_needs(with_sweep(configuration, nodes), [NAME])
    run = RunDirectory.at(folder)
    ledger = Ledger(run)
    tracked = Trackers((), run, "benchmark", configuration.experiment.name, {})
    with Display() as display, tracked as trackers:
        settings = configuration.settings
        session = Session(run, "benchmark", ledger, launcher, display, nodes, trackers, settings)
        failed = run_stages(stages, session)
    if failed is not None:
        raise RuntimeError(failed)
    rows = {row["point"]["train.training.seed"]: row for row in ledger.rows("trials")}
    return [float(rows[seed]["loss_final"]) for seed in plan.seeds]
