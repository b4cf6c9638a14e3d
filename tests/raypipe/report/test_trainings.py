"""Plots of training runs: loss, rate, speed, held-out metrics and hardware."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.testing import assert_allclose, assert_array_equal

from raypipe.graph.tables import CORE
from raypipe.report.plots import Plot
from raypipe.report.results import Declarations, RunResults
from raypipe.report.sections import training_plots
from raypipe.store.tables import by_name

GIB = 2**30


def _steps(trials: int = 1, points: int = 60, **columns: object) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    step = np.arange(10, 10 * points + 1, 10)
    parts = [
        pd.DataFrame({"trial_id": f"trial-{i}", "step": step, "lr": 1e-3, "samples_per_s": 400.0,
                      "loss": 1 + i + 5 * np.exp(-step / 100) + rng.normal(0, 0.05, points)})
        for i in range(trials)
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True).assign(**columns)


def _run(**tables: pd.DataFrame) -> RunResults:
    return RunResults(tables, declared=Declarations(core=by_name(CORE)))


def _named(**tables: pd.DataFrame) -> dict[str, Plot]:
    return {figure.name: figure for figure in training_plots(_run(**tables))}


def test_nothing_to_draw_gives_no_figures() -> None:
    assert _named() == {}
    assert _named(steps=_steps().iloc[:0]) == {}
    assert _named(steps=_steps(loss=np.nan, samples_per_s=np.nan)) == {}
    assert _named(gpu_samples=_samples("t", [0], rank=0, util=[None], memory_bytes=[None])) == {}


def test_the_loss_curve_is_the_table_and_its_running_median() -> None:
    steps = _steps()
    trials = pd.DataFrame({"trial_id": ["trial-0"], "stage": ["train_small"]})
    figures = _named(steps=steps.sample(frac=1, random_state=0), trials=trials)
    assert list(figures) == ["loss-train_small"]  # the speed and the rate do not change
    raw, smooth = figures["loss-train_small"].figure.axes[0].lines
    assert_array_equal(raw.get_xdata(), steps["step"])
    assert_array_equal(raw.get_ydata(), steps["loss"])
    median = steps["loss"].rolling(3, center=True, min_periods=1).median()
    assert_allclose(smooth.get_ydata(), median)
    falling = _steps().assign(loss=lambda table: np.exp(-table["step"] / 100))
    assert _named(steps=falling)["loss-trial-0"].figure.axes[0].get_yscale() == "log"


def _samples(name: str, seconds: list[float], **columns: object) -> pd.DataFrame:
    at = pd.Timestamp("2026-03-02 09:00", tz="UTC") + pd.to_timedelta(seconds, unit="s")
    return pd.DataFrame({"trial_id": name, "stage": "train", "at": at, **columns})


def test_hardware_is_drawn_against_time_for_each_worker_and_attempt() -> None:
    parts = [
        _samples("t", [start + 1, start], rank=rank, attempt=attempt, util=None,
                 memory_bytes=[4 * GIB, 2 * GIB], cpu_util=[100.0 + rank, None])
        for rank in (1, 0)
        for attempt, start in ((1, 0), (2, 60))
    ]  # fmt: skip
    figures = _named(gpu_samples=pd.concat(parts))
    assert list(figures) == ["memory_bytes-train", "cpu_util-train"]
    assert figures["memory_bytes-train"].title == "Memory: train"
    axes = figures["memory_bytes-train"].figure.axes[0]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(names) == ["worker 0", "worker 0", "worker 1", "worker 1"]
    drawn = [line.get_data() for line in axes.lines if str(line.get_label())[:1] != "_"]
    assert sorted(list(x) for x, _ in drawn) == [[0, 1], [0, 1], [60, 61], [60, 61]]
    assert_allclose(drawn[0][1], [2 * GIB, 4 * GIB])
