"""raypipe's side of the benchmarks that time it: it does the work that they count."""

from __future__ import annotations

from pathlib import Path

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
