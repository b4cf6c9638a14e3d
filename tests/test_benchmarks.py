"""raypipe's side of the benchmarks that time it: it does the work that they count."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import objective_curves, prediction
from benchmarks.scaling import overhead
from benchmarks.trials import by_raypipe
from benchmarks.trials.experiment import spans
from benchmarks.trials.plan import Plan
from raypipe.launch.inline import InlineLauncher


def test_the_overhead_benchmark_finishes_its_units(tmp_path: Path) -> None:
    case = overhead.Case("noop", 1.0, 5)
    assert overhead.by_raypipe(case, InlineLauncher(), tmp_path / "run") == 5


def test_the_sweep_benchmark_trains_and_times_every_trial(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.mkdir()
    losses = by_raypipe.run(Plan(1, 2, 5), InlineLauncher(), clock, tmp_path / "run")
    assert len(losses) == len(spans(clock)) == 2
    assert all(loss > 0 for loss in losses)


def test_the_prediction_benchmark_keeps_rows_of_equal_trainings(tmp_path: Path) -> None:
    first, second = prediction.PUBLISHED[:2]
    stored = [asdict(first) | {"predicted_gb": 1.0}, asdict(second) | {"predicted_gb": 2.0}]
    changed = replace(first, micro_batch=first.micro_batch + 1)
    file, asked = tmp_path / "rows.json", []

    def predict(training: prediction.Training) -> dict[str, object]:
        asked.append(training)
        return asdict(training) | {"predicted_gb": 3.0}

    prediction.write(file, [changed, second], stored, predict)
    assert asked == [changed]
    rows = json.loads(file.read_text())["rows"]
    assert [row["predicted_gb"] for row in rows] == [3.0, 2.0]


def test_the_depth_of_an_optimum_is_in_units_of_the_noise() -> None:
    means = {2: 30.0, 4: 20.0, 8: 10.0, 16: 11.0, 32: 13.0, 64: 90.0}
    fits = [(T, mean + side) for T, mean in means.items() for side in (-1, 1)]
    table = pd.DataFrame(fits, columns=["T", "value"])
    found = objective_curves.depth(table)
    assert (found["best_T"], found["lowest"]) == (8, 10)
    assert found["noise"] == pytest.approx(math.sqrt(2))
    assert (found["left"], found["right"]) == pytest.approx((20 / 2**0.5, 80 / 2**0.5))
    curves = [table.assign(documents=9, objective=kind) for kind in objective_curves.OBJECTIVES]
    panels = objective_curves.drawn(pd.concat(curves)).axes
    assert [panel.get_title("left").endswith("best T = 8") for panel in panels] == [True] * 3
