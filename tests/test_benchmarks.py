"""raypipe's side of the benchmarks that time it: it does the work that they count."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.scaling import overhead
from benchmarks.trials import by_raypipe
from benchmarks.trials.__main__ import measure
from benchmarks.trials.experiment import sweep_of
from raypipe.launch.inline import InlineLauncher


def test_the_overhead_benchmark_finishes_its_units(tmp_path: Path) -> None:
    case = overhead.Case("noop", 1.0, 5)
    assert overhead.by_raypipe(case, InlineLauncher(), tmp_path / "run") == 5


def test_the_benchmark_of_trials_trains_and_times_every_point() -> None:
    study = sweep_of(2, 1, 5)
    row, losses = measure(partial(by_raypipe.sweep, local=True), study, 1)
    assert len(losses) == 2
    assert all(loss > 0 for loss in losses)
    assert 0 < row["overhead_s"] < row["wall_s"]
