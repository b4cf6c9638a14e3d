"""Plots of training runs: loss, rate, speed, held-out metrics and hardware."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.testing import assert_allclose, assert_array_equal

from raypipe.report.parts import TableView
from raypipe.report.plots import Plot
from raypipe.report.run_results import RunResults
from raypipe.report.trainings import training_plots, training_section

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


def _named(tables: dict[str, pd.DataFrame]) -> dict[str, Plot]:
    return {figure.name: figure for figure in training_plots(tables)}


def test_nothing_to_draw_gives_no_figures() -> None:
    assert _named({}) == {}
    assert _named({"steps": _steps().iloc[:0]}) == {}
    assert _named({"steps": _steps(loss=np.nan, samples_per_s=np.nan)}) == {}
    nothing = _samples("t", [0], gpu_uuid="GPU-a", util=[None], memory_bytes=[None])
    assert _named({"gpu_samples": nothing}) == {}


def test_the_loss_curve_is_the_table_and_its_running_median() -> None:
    steps = _steps()
    trials = pd.DataFrame({"trial_id": ["trial-0"], "stage": ["train_small"]})
    figures = _named({"steps": steps.sample(frac=1, random_state=0), "trials": trials})
    assert list(figures) == ["loss-train_small", "samples_per_s-train_small"]
    raw, smooth = figures["loss-train_small"].figure.axes[0].lines
    assert_array_equal(raw.get_xdata(), steps["step"])
    assert_array_equal(raw.get_ydata(), steps["loss"])
    median = steps["loss"].rolling(3, center=True, min_periods=1).median()
    assert_allclose(smooth.get_ydata(), median)
    falling = _steps().assign(loss=lambda table: np.exp(-table["step"] / 100))
    assert _named({"steps": falling})["loss-trial-0"].figure.axes[0].get_yscale() == "log"


def _samples(name: str, seconds: list[float], **columns: object) -> pd.DataFrame:
    at = pd.Timestamp("2026-03-02 09:00", tz="UTC") + pd.to_timedelta(seconds, unit="s")
    return pd.DataFrame({"trial_id": name, "stage": "train", "at": at, **columns})


def test_gpu_samples_are_drawn_against_time_for_each_device() -> None:
    one = _samples("t", [2, 0], gpu_uuid="GPU-a", util=[90.0, 10.0],
                   memory_bytes=[4 * GIB, 2 * GIB])  # fmt: skip
    two = one.assign(gpu_uuid="GPU-b", util=[50.0, 50.0])
    cpu = _samples("t", [0, 1], rank=1, cpu_util=[5.0, 6.0], rss_bytes=[1 * GIB, 9 * GIB])
    use, memory, *_ = training_plots({"gpu_samples": pd.concat([one, two, cpu])})
    assert (use.name, memory.name) == ("util-train", "memory_bytes-train")
    axes = use.figure.axes[0]
    lines = [line for line in axes.lines if str(line.get_label())[:1] != "_"]
    assert [text.get_text() for text in axes.texts] == ["GPU-a", "GPU-b"]
    assert_allclose(lines[0].get_data(), ([0, 2], [10, 90]))


def test_without_a_gpu_the_use_of_the_cpu_is_drawn_for_each_worker_and_attempt() -> None:
    parts = [
        _samples("t", [start, start + 1], rank=rank, attempt=attempt, gpu_uuid=None, util=None,
                 memory_bytes=None, cpu_util=[None, 100.0 + rank], rss_bytes=[GIB, 2 * GIB])
        for rank in (1, 0)
        for attempt, start in ((1, 0), (2, 60))
    ]  # fmt: skip
    use, memory = training_plots({"gpu_samples": pd.concat(parts)})
    assert use.name == "cpu_util-train"
    lines = [list(line.get_xdata()) for line in memory.figure.axes[0].lines
             if str(line.get_label())[:1] != "_"]  # fmt: skip
    assert sorted(lines) == [[0, 1], [0, 1], [60, 61], [60, 61]]


def test_every_held_out_column_is_drawn_and_listed() -> None:
    steps = pd.DataFrame({"trial_id": "train", "step": [10, 20, 30, 40], "loss": 1.0,
                          "samples_per_s": 9.0, "eval_loss": [5.0, 3.0, 3.5, 4.0],
                          "eval_size": [0.1, 0.2, 0.3, 0.4]})  # fmt: skip
    trials = pd.DataFrame({"trial_id": ["train"], "stage": "train", "status": "succeeded",
                           "steps": 40, "eval_loss": 4.0, "eval_size": 0.4})  # fmt: skip
    tables = {"steps": steps, "trials": trials}
    section = training_section(tables, RunResults(tables).evaluations)
    view = section.parts[-1]
    assert isinstance(view, TableView)
    assert view.visible_columns == ["trial_id", "status", "steps", "eval_loss", "eval_size"]
    drawn = [part for part in section.parts if isinstance(part, Plot)]
    assert [plot.name for plot in drawn][:2] == ["eval_size-train", "eval_loss-train"]
    (ring,) = (line for line in drawn[1].figure.axes[0].lines if line.get_label() == "_best")
    assert ring.get_xydata().tolist() == [[20.0, 3.0]]
    assert "ended worse than the best by more than noise" in drawn[1].caption


def test_noise_is_no_worse_end() -> None:
    curves = (np.random.default_rng(seed).normal(size=40) for seed in range(200))
    parts = [_steps(points=40, trial_id=f"t{n}", eval_loss=1 + 0.05 * each)
             for n, each in enumerate(curves)]  # fmt: skip
    found = RunResults({"steps": pd.concat(parts)}).evaluations
    assert len(found) == 200
    assert sum(each.ends_worse for each in found) <= 6
