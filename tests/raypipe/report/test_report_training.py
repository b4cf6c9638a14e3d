from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from raypipe.report.plots import Plot
from raypipe.report.training import training_plots

GIB = 2**30


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


def _named(figures: list[Plot]) -> dict[str, Plot]:
    return {figure.name: figure for figure in figures}


def test_nothing_to_draw_gives_no_figures() -> None:
    assert training_plots({}) == []
    assert training_plots({"steps": _steps().iloc[:0]}) == []
    assert training_plots({"steps": _steps().assign(loss=np.nan, samples_per_s=np.nan)}) == []


def test_the_loss_curve_is_the_table_and_its_running_median() -> None:
    steps = _steps()
    trials = pd.DataFrame({"trial_id": ["trial-0"], "stage": ["train_small"]})
    figures = _named(training_plots({"steps": steps.sample(frac=1, random_state=0),
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
    axes = _named(training_plots({"steps": steps}))["loss-training"].figure.axes[0]
    assert axes.get_yscale() == "log"


def test_a_further_phase_is_marked_where_it_begins() -> None:
    steps = _steps(points=20)
    steps["phase"] = np.where(steps["step"] < 150, "burn_in", "policy")
    for figure in training_plots({"steps": steps}):
        axes = figure.figure.axes[0]
        assert list(axes.lines[-1].get_xdata()) == [150, 150]
        assert axes.texts[-1].get_text() == " policy"
    (plain,) = (f for f in training_plots({"steps": _steps(points=20)}) if "loss" in f.name)
    assert len(plain.figure.axes[0].lines) == 1


def test_throughput_starts_at_zero() -> None:
    axes = _named(training_plots({"steps": _steps()}))["throughput-training"].figure.axes[0]
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize(("trials", "named"), [(2, 2), (8, 8), (12, 1)])
def test_few_trials_are_all_named_and_of_many_only_the_lowest(trials: int, named: int) -> None:
    figure = _named(training_plots({"steps": _steps(trials)}))["loss-training"]
    texts = [text.get_text() for text in figure.figure.axes[0].texts]
    assert len(texts) == named
    assert "trial-0" in texts


def _samples(name: str, seconds: list[float], **columns: object) -> pd.DataFrame:
    at = pd.Timestamp("2026-03-02 09:00", tz="UTC") + pd.to_timedelta(seconds, unit="s")
    return pd.DataFrame({"trial_id": name, "at": at, **columns})


def test_gpu_samples_are_drawn_against_time_for_each_device() -> None:
    one = _samples(
        "t", [2, 0], gpu_uuid="GPU-a", util=[90.0, 10.0], memory_bytes=[4 * GIB, 2 * GIB]
    )
    two = one.assign(gpu_uuid="GPU-b", util=[50.0, 50.0])
    (figure,) = training_plots({"gpu_samples": pd.concat([one, two])})
    util, memory = figure.figure.axes
    assert len(util.lines) == 2
    assert [text.get_text() for text in memory.texts] == ["GPU-a", "GPU-b"]
    assert_allclose(util.lines[0].get_xdata(), [0, 2])
    assert_allclose(util.lines[0].get_ydata(), [10, 90])
    assert_allclose(memory.lines[0].get_ydata(), [2, 4])
    assert figure.caption == "2 GPUs; mean utilization 50 %, peak memory 4.0 GiB (NVML samples)."
    (single,) = training_plots({"gpu_samples": one})
    assert single.caption == "Mean utilization 50 %, peak memory 4.0 GiB (NVML samples)."


def test_a_worker_without_a_gpu_is_not_in_the_figure_of_the_gpus() -> None:
    gpu = _samples(
        "t", [0, 1], gpu_uuid="GPU-a", util=[20.0, 40.0], memory_bytes=[1 * GIB, 2 * GIB]
    )
    cpu = _samples(
        "t", [0, 1], gpu_uuid=None, rank=1, cpu_util=[5.0, 6.0], rss_bytes=[1 * GIB, 9 * GIB]
    )
    (figure,) = training_plots({"gpu_samples": pd.concat([gpu, cpu])})
    assert (figure.name, len(figure.figure.axes[0].lines)) == ("gpu-training", 1)
    assert figure.caption == "Mean utilization 30 %, peak memory 2.0 GiB (NVML samples)."


def _cpu(name: str, seconds: list[float], *, rank: int, attempt: int = 1) -> pd.DataFrame:
    return _samples(
        name, seconds, rank=rank, attempt=attempt, gpu_uuid=None, util=None, memory_bytes=None,
        power_w=None, cpu_util=[None, 100.0 + rank], rss_bytes=[GIB, 2 * GIB],
        warmup=[True, False],
    )  # fmt: skip


def test_without_a_gpu_the_use_of_the_cpu_is_drawn_for_each_worker() -> None:
    (figure,) = training_plots({"gpu_samples": _cpu("t", [5, 7], rank=0)})
    assert (figure.name, figure.title) == ("cpu-training", "CPU use: training")
    use, memory = figure.figure.axes
    assert_allclose(use.lines[0].get_ydata(), [np.nan, 100])
    assert_allclose(memory.lines[0].get_xdata(), [0, 2])
    assert_allclose(memory.lines[0].get_ydata(), [1, 2])
    assert figure.caption == (
        "A worker with its loader: mean use 100 % of one core, peak memory 2.0 GiB."
    )


def test_an_attempt_has_its_own_line_and_its_worker_one_color() -> None:
    parts = [
        _cpu("t", [start, start + 1], rank=rank, attempt=attempt)
        for rank in (1, 0)
        for attempt, start in ((1, 0), (2, 60))
    ]
    (figure,) = training_plots({"gpu_samples": pd.concat(parts)})
    use, memory = figure.figure.axes
    assert [text.get_text() for text in memory.texts] == ["worker 0", "worker 1"]
    assert [list(line.get_xdata()) for line in use.lines] == [[0, 1], [60, 61]] * 2
    first, again, other, _ = (line.get_color() for line in use.lines)
    assert first == again != other
    assert figure.caption.startswith("2 workers, each with its loader: mean use 100 %")


def test_the_mean_leaves_the_warm_up_out_unless_there_is_nothing_else() -> None:
    table = _samples(
        "t", [0, 1], gpu_uuid="GPU-a", util=[10.0, 90.0], memory_bytes=[3 * GIB, 1 * GIB]
    )
    for warmup, mean in (([True, False], "90 %"), ([True, True], "50 %")):
        (figure,) = training_plots({"gpu_samples": table.assign(warmup=warmup)})
        assert f"utilization {mean}, peak memory 3.0 GiB" in figure.caption


def test_samples_that_tell_nothing_give_no_figure() -> None:
    table = _samples("t", [0], gpu_uuid="GPU-a", util=[None], memory_bytes=[None], power_w=[None])
    assert training_plots({"gpu_samples": table}) == []
