"""An experiment with a training, and two stages behind it that show which model they saw."""

from __future__ import annotations

from typing import Any

from example_tasks import HeldOut, TwoPhases

import raypipe as rp


class Halves(TwoPhases):
    """Its first phase is half of the training."""

    def phases(self, training: Any, effective_batch: int) -> list[rp.Phase]:
        steps = training.steps // 2
        return [rp.Phase(name, steps, effective_batch, 1e-2) for name in ("first", "second")]


class ContinuingSettings(rp.Settings):
    pause_s: rp.Operational[float] = 0.0
    """Pause in a forward pass."""
    fail_at: rp.Operational[int | None] = None
    """Step whose loss fails."""
    halves: bool = False
    """Whether the training has two phases."""
    probes: int = 1
    """Probes of the model, each a unit."""
    broken: bool = False
    """Whether the probes fail."""
    train: rp.TrainStageSettings = rp.TrainStageSettings()


READS = ("halves", "pause_s", "fail_at", "train")


def build_task(settings: Any, run_dir: rp.RunDirectory | None) -> rp.TrainTask:
    given = {"pause_s": settings.pause_s, "fail_at": settings.fail_at}
    return Halves() if settings.halves else HeldOut(dropout=0.3, **given)


def probe(context: rp.StageContext) -> None:
    """Write a row per unit: the sum of the weights, and how often the unit was computed."""
    weights, _ = rp.weights.read_weights(context.run_dir, context.run_dir.model("train"))
    total = sum(float(each.sum()) for each in weights.values())
    if context.settings.broken:
        raise RuntimeError("the probes fail")
    for unit in context.todo():
        seen = context.ledger.get("probes", unit.key) or {"times": 0}
        row = {"weights": total, "times": seen["times"] + 1}
        context.finish(unit, {"probes": {unit.key: row}})


def double(context: rp.StageContext) -> None:
    """Write a row that depends on the training through the probes alone."""
    (unit,) = context.todo()
    total = sum(row["weights"] for row in context.ledger.rows("probes"))
    context.finish(unit, {"doubles": {"sum": {"weights": 2 * total}}})


def stages(settings: ContinuingSettings) -> list[rp.Stage]:
    units = [rp.Unit(f"probe/{number}") for number in range(settings.probes)]
    return [
        rp.train_stage("train", settings.train, build_task, reads=READS),
        rp.Stage("probe", probe, units, ("train",), reads=("broken",)),
        rp.Stage("double", double, needs=("probe",), reads=()),
    ]


EXPERIMENT = rp.Experiment("continuing", 1, ContinuingSettings, stages)
