from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from raypipe.report.figures import Figure
from raypipe.report.training import training_figures


def _steps(trials: int = 1, points: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    parts = []
    for i in range(trials):
        step = np.arange(10, 10 * points + 1, 10)
        loss = 1 + i + 5 * np.exp(-step / 100) + rng.normal(0, 0.05, points)
        parts.append(
            pd.DataFrame({"trial_id": f"trial-{i}", "step": step, "loss": loss, "lr": 1e-3}).assign(
                samples_per_s=400.0 + 10 * i
            )
        )
    return pd.concat(parts, ignore_index=True)


def _named(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_nothing_to_draw_gives_no_figures() -> None:
    assert training_figures({}) == []
    assert training_figures({"steps": _steps().iloc[:0]}) == []
    assert training_figures({"steps": _steps().assign(loss=np.nan, samples_per_s=np.nan)}) == []


def test_the_loss_curve_is_the_table_and_its_running_median() -> None:
    steps = _steps()
    trials = pd.DataFrame({"trial_id": ["trial-0"], "stage": ["train_small"]})
    figures = _named(training_figures({"steps": steps.sample(frac=1, random_state=0),
                                       "trials": trials}))  # fmt: skip
    assert list(figures) == ["loss-train_small", "throughput-train_small"]
    raw, smooth = figures["loss-train_small"].figure.axes[0].lines
    assert_array_equal(raw.get_xdata(), steps["step"])
    assert_array_equal(raw.get_ydata(), steps["loss"])
    assert_allclose(
        smooth.get_ydata(), steps["loss"].rolling(3, center=True, min_periods=1).median()
    )


def test_the_loss_axis_is_logarithmic_when_the_loss_falls_far() -> None:
    steps = _steps().assign(loss=lambda t: np.exp(-t["step"] / 100))
    axes = _named(training_figures({"steps": steps}))["loss-training"].figure.axes[0]
    assert axes.get_yscale() == "log"


def test_a_further_phase_is_marked_where_it_begins() -> None:
    steps = _steps(points=20)
    steps["phase"] = np.where(steps["step"] < 150, "burn_in", "policy")
    for figure in training_figures({"steps": steps}):
        axes = figure.figure.axes[0]
        assert list(axes.lines[-1].get_xdata()) == [150, 150]
        assert axes.texts[-1].get_text() == " policy"
    (plain,) = (f for f in training_figures({"steps": _steps(points=20)}) if "loss" in f.name)
    assert len(plain.figure.axes[0].lines) == 1


def test_throughput_starts_at_zero() -> None:
    axes = _named(training_figures({"steps": _steps()}))["throughput-training"].figure.axes[0]
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize(("trials", "named"), [(2, 2), (8, 8), (12, 1)])
def test_few_trials_are_all_named_and_of_many_only_the_lowest(trials: int, named: int) -> None:
    figure = _named(training_figures({"steps": _steps(trials)}))["loss-training"]
    texts = [text.get_text() for text in figure.figure.axes[0].texts]
    assert len(texts) == named
    assert "trial-0" in texts


def test_gpu_samples_are_drawn_against_time_for_each_device() -> None:
    at = pd.to_datetime(["2026-03-02 09:00:02", "2026-03-02 09:00:00"], utc=True)
    one = pd.DataFrame({"trial_id": "t", "gpu_uuid": "GPU-a", "at": at, "util": [90.0, 10.0],
                        "memory_bytes": [4e9, 2e9]})  # fmt: skip
    two = one.assign(gpu_uuid="GPU-b", util=[50.0, 50.0])
    figure = training_figures({"gpu_samples": pd.concat([one, two])})[0]
    util, memory = figure.figure.axes
    assert len(util.lines) == len(memory.lines) == 2
    assert_allclose(util.lines[0].get_xdata(), [0, 2])
    assert_allclose(util.lines[0].get_ydata(), [10, 90])
    assert_allclose(memory.lines[0].get_ydata(), [2, 4])
    assert "50 %" in figure.caption
    assert "4 GB" in figure.caption
