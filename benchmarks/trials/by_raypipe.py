"""The trainings as a sweep and as a matrix of raypipe, by its public functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import raypipe as rp
from benchmarks.trials.experiment import Study
from raypipe.config.matrix import SEED_STRIDE


def sweep(study: Study, clock: Path, folder: Path, *, local: bool = False) -> list[float]:
    """Run a sweep over the seeds; return the last losses."""
    warmup = study.steps // 5
    seeds = [seed for *_, seed in study.points]
    section = {"stage": "train", "kind": "systems", "concurrent": 1, "repeats": 1,
               "warmup_steps": warmup, "steps": study.steps - warmup,
               "axes": {"training.seed": seeds}}  # fmt: skip
    configuration = {**_configuration(study, clock), "sweep": section}
    run = rp.run(configuration, only=["sweep"], run_dir=folder, local=local)
    found = run.table("trials").merge(run.table("sweep_points"), on="trial_id")
    losses = dict(zip(found["train.training.seed"], found["loss_final"], strict=True))
    return [float(losses[seed]) for seed in seeds]


def matrix(study: Study, clock: Path, folder: Path, *, local: bool = False) -> list[float]:
    """Run a matrix of all points; return the last losses."""
    rates, norms, runs = (list(dict.fromkeys(axis)) for axis in zip(*study.points, strict=True))
    axes = {"train.training.learning_rate": rates, "train.training.clip_norm": norms}
    section = {"axes": axes, "runs": len(runs)}
    run = rp.run({**_configuration(study, clock), "matrix": section}, run_dir=folder, local=local)
    points: dict[str, dict[str, float]] = {}
    for row in run.table("variants").to_dict("records"):
        points.setdefault(row["variant"], {})[row["key"]] = row["number"]
    losses = {}
    for row in run.table("trials").to_dict("records"):
        values = points[row["variant"]]
        point = *(values[axis] for axis in axes), SEED_STRIDE * int(values["seed"])
        losses[point] = float(row["loss_final"])
    return [losses[point] for point in study.points]


def _configuration(study: Study, clock: Path) -> dict[str, Any]:
    learning_rate, clip_norm, _ = study.points[0]
    training = {"micro_batch": study.micro_batch, "accumulation": 1, "optimizer": "adamw",
                "schedule": "constant", "learning_rate": learning_rate, "clip_norm": clip_norm,
                "seed": 0}  # fmt: skip
    scaling = {"workers": study.workers, "gpus_per_worker": 0, "cpus_per_worker": 1}
    return {
        "experiment": "benchmarks.trials.experiment",
        "steps": study.steps,
        "clock": str(clock),
        "model": study.model.model_dump(),
        "train": {"training": training, "scaling": scaling, "loader": {"workers": 0}},
    }
