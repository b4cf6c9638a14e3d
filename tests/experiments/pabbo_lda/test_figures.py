from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread
from matplotlib.lines import Line2D
from numpy.testing import assert_allclose

from experiments.pabbo_lda.figures import convergence_figures
from experiments.pabbo_lda.figures.optimizer_styles import NAMES
from experiments.pabbo_lda.figures.report_figures import figures
from raypipe.report.plots import Plot, encode

START = [733, 133, 355, 115]
KINDS = ["best_by_evaluation", "best_by_time", "excess_by_evaluation", "excess_by_time"]
KINDS += ["final_bars", "final_boxes", "t_trajectory"]


def _tables(
    datasets: list[str], optimizers: list[str], runs: int, length: int = 12
) -> dict[str, pd.DataFrame]:
    """Studies on a made-up objective, one evaluation after the other, with a shared start."""
    history = []
    for d, dataset in enumerate(datasets):
        for o, optimizer in enumerate(optimizers):
            for run in range(runs):
                rng = np.random.default_rng([d, o, run])
                T = [*START, *rng.choice(np.arange(2, 100), length - len(START), replace=False)]
                value = 1500 + np.abs(np.log(np.array(T) / 10)) ** 4 * 40 + 7 * run
                seconds = np.cumsum(5 + 0.1 * np.array(T))
                best = np.minimum.accumulate(value)
                history += [
                    {
                        "dataset": dataset,
                        "optimizer": optimizer,
                        "run": run,
                        "seed": 42 + run,
                        "evaluation": i + 1,
                        "batch": 0 if i < len(START) else 1 + i,
                        "T": int(T[i]),
                        "value": value[i],
                        "best_T": int(T[int(np.argmin(value[: i + 1]))]),
                        "best_value": best[i],
                        "cpu_s": seconds[i],
                    }
                    for i in range(length)
                ]
    table = pd.DataFrame(history)
    last = table.groupby(["dataset", "optimizer", "run"], sort=False).last().reset_index()
    studies = last.rename(columns={"best_value": "best_perplexity"})
    summary = (
        studies.groupby(["dataset", "optimizer"], sort=False)["best_perplexity"]
        .agg(["count", "mean", "std", "min", "max", "median"])
        .reset_index()
        .rename(columns={"count": "runs"})
    )
    return {"study_history": table, "studies": studies, "summary": summary}


def _named(tables: dict[str, pd.DataFrame]) -> dict[str, Plot]:
    return {figure.name: figure for figure in figures(tables)}


def _line(axes: Axes, label: str) -> Line2D:
    return next(line for line in axes.lines if line.get_label() == label)


def _at(line: Line2D, x: np.ndarray) -> np.ndarray:
    """A step curve's value at each x."""
    known = np.asarray(line.get_xdata(), float)
    assert line.get_drawstyle() == "steps-post"
    return np.asarray(line.get_ydata(), float)[np.searchsorted(known, x, side="right") - 1]


@pytest.mark.parametrize(("datasets", "optimizers", "runs"), [(1, 2, 1), (4, 8, 3), (2, 3, 10)])
def test_every_corpus_gets_every_kind_of_figure(datasets: int, optimizers: int, runs: int) -> None:
    names = [f"corpus{i}" for i in range(datasets)]
    drawn = figures(_tables(names, list(NAMES)[:optimizers], runs))
    assert [figure.name for figure in drawn] == [f"{k}-{name}" for k in KINDS for name in names]
    for figure in drawn[:: datasets + 1]:
        files = encode(figure)
        assert imread(io.BytesIO(files["png"]))[..., :3].std() > 0.01
        assert len(files["svg"]) > 5000


def test_the_curve_by_evaluation_is_the_median_with_the_quartiles() -> None:
    tables = _tables(["corpus"], ["ga", "tpe"], 5)
    axes = _named(tables)["best_by_evaluation-corpus"].figure.axes[0]
    table = tables["study_history"]
    best = table[table["optimizer"] == "tpe"].pivot(
        index="evaluation", columns="run", values="best_value"
    )
    assert_allclose(_at(_line(axes, "tpe"), np.arange(1, 13)), best.median(axis=1))
    corners = axes.collections[1].get_paths()[0].vertices
    assert corners[:, 1].min() == pytest.approx(best.quantile(0.25, axis=1).min())
    assert corners[:, 1].max() == pytest.approx(best.quantile(0.75, axis=1).max())


def test_one_run_is_drawn_without_a_band() -> None:
    tables = _tables(["corpus"], ["ga"], 1)
    drawn = _named(tables)
    axes = drawn["best_by_evaluation-corpus"].figure.axes[0]
    assert not axes.collections
    best = tables["study_history"]["best_value"]
    assert_allclose(_at(_line(axes, "ga"), np.arange(1, 13)), best)
    assert "median" not in drawn["best_by_evaluation-corpus"].caption


def test_a_study_that_ends_early_carries_its_best_forward() -> None:
    tables = _tables(["corpus"], ["ga", "golden_section"], 3)
    table = tables["study_history"]
    short = (table["optimizer"] == "golden_section") & (table["evaluation"] > 8)
    tables["study_history"] = table[~short]
    figure = _named(tables)["best_by_evaluation-corpus"]
    axes = figure.figure.axes[0]
    assert _line(axes, "golden_section").get_xdata()[-1] == 8
    carried = _line(axes, "_carried")
    assert list(carried.get_xdata()) == [8, 12]
    assert len(set(carried.get_ydata())) == 1
    assert "Dotted" in figure.caption


def test_the_start_population_is_marked_only_where_all_studies_share_it() -> None:
    tables = _tables(["corpus"], ["ga", "es"], 2)
    figure = _named(tables)["best_by_evaluation-corpus"]
    span = next(p for p in figure.figure.axes[0].patches if p.get_label() == "_start")
    assert span.get_x() + span.get_width() == len(START)
    assert f"first {len(START)} evaluations" in figure.caption

    table = tables["study_history"]
    other = (table["optimizer"] == "es") & (table["evaluation"] == 1)
    tables["study_history"] = table.assign(T=table["T"].mask(other, 500))
    figure = _named(tables)["best_by_evaluation-corpus"]
    assert not [p for p in figure.figure.axes[0].patches if p.get_label() == "_start"]


def test_the_curve_by_time_is_the_median_of_the_runs_at_each_moment() -> None:
    tables = _tables(["corpus"], ["ga"], 3)
    axes = _named(tables)["best_by_time-corpus"].figure.axes[0]
    table = tables["study_history"]
    scale = 60 if table["cpu_s"].max() >= 120 else 1
    first = table[table["evaluation"] == 1]["cpu_s"].max()
    moments = np.linspace(first, table["cpu_s"].max(), 50)
    expected = []
    for moment in moments:
        seen = table[table["cpu_s"] <= moment]
        expected.append(np.median(seen.groupby("run")["best_value"].min()))
    assert_allclose(_at(_line(axes, "ga"), moments / scale + 1e-9), expected)


def test_bars_start_at_zero_and_show_mean_and_deviation() -> None:
    tables = _tables(["corpus"], ["ga", "es", "random"], 4)
    axes = _named(tables)["final_bars-corpus"].figure.axes[0]
    assert axes.get_xlim()[0] == 0
    summary = tables["summary"].sort_values("mean", ascending=False)
    bars = [p for p in axes.patches if p.get_width() > 0]
    assert_allclose([bar.get_width() for bar in bars], summary["mean"])
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        NAMES[name] for name in summary["optimizer"]
    ]
    segments = np.array(axes.collections[0].get_segments())[:, :, 0]
    assert_allclose(segments[:, 1] - segments[:, 0], 2 * summary["std"])


def test_bars_of_values_below_zero_are_shown_whole() -> None:
    tables = _tables(["corpus"], ["ga", "es", "random"], 4)
    tables["summary"][["mean", "std"]] = [[-0.25, 0.01], [-0.2, 0.01], [-0.1, 0.01]]
    axes = _named(tables)["final_bars-corpus"].figure.axes[0]
    low, high = axes.get_xlim()
    assert low <= -0.26
    assert high == 0


def test_bars_that_no_linear_axis_can_show_become_points() -> None:
    tables = _tables(["corpus"], ["ga", "es"], 3)
    summary = tables["summary"]
    factor = np.where(summary["optimizer"] == "es", 1e40, 1.0)
    for column in ("mean", "std", "min"):
        summary[column] *= factor
    figure = _named(tables)["final_bars-corpus"]
    assert figure.figure.axes[0].get_xscale() == "log"
    assert not figure.figure.axes[0].patches
    assert "points, not bars" in figure.caption


def test_boxes_hold_every_finite_run_best_median_first() -> None:
    tables = _tables(["corpus"], ["ga", "es"], 5)
    studies = tables["studies"]
    studies.loc[(studies["optimizer"] == "ga") & (studies["run"] == 0), "best_perplexity"] = np.inf
    figure = _named(tables)["final_boxes-corpus"]
    axes = figure.figure.axes[0]
    medians = []
    for points in axes.collections:
        group = studies[studies["optimizer"] == points.get_label()]["best_perplexity"]
        shown = np.asarray(points.get_offsets())[:, 1]
        assert_allclose(sorted(shown), sorted(group[np.isfinite(group)]))
        medians.append(np.median(shown))
    assert len(medians) == 2
    assert medians == sorted(medians)
    assert "1 run without a finite value" in figure.caption


def test_the_trajectory_shows_all_that_was_tried_and_the_median_best() -> None:
    tables = _tables(["corpus"], ["ga", "sabbo", "random"], 4)
    drawn = _named(tables)["t_trajectory-corpus"].figure
    table = tables["study_history"]
    assert [axes.get_title("left") for axes in drawn.axes] == ["GA", "SABBO", "random"]
    for axes, name in zip(drawn.axes, ("ga", "sabbo", "random"), strict=True):
        own = table[table["optimizer"] == name]
        assert axes.get_yscale() == "log"
        tried = _line(axes, "T")
        assert_allclose(tried.get_ydata(), own["T"])
        assert_allclose(tried.get_xdata(), own["evaluation"])
        best = own.pivot(index="evaluation", columns="run", values="best_T").median(axis=1)
        assert_allclose(_line(axes, "best T").get_ydata(), best)


def test_colors_are_the_same_in_all_figures_and_whatever_the_selection() -> None:
    few = _named(_tables(["corpus"], ["sabbo", "random"], 2))
    many = _named(_tables(["corpus"], list(NAMES), 2))
    for name in ("best_by_evaluation-corpus", "best_by_time-corpus"):
        for optimizer in ("sabbo", "random"):
            lines = [_line(d[name].figure.axes[0], optimizer) for d in (few, many)]
            assert lines[0].get_color() == lines[1].get_color()
    axes = many["best_by_evaluation-corpus"].figure.axes[0]
    drawn = [_line(axes, name) for name in NAMES]
    strokes = {(line.get_color(), line.is_dashed()) for line in drawn}
    assert len(strokes) == len(NAMES)


def test_values_that_are_infinite_missing_or_huge_are_survived() -> None:
    tables = _tables(["corpus", "broken"], ["ga", "unknown_one"], 3)
    history = tables["study_history"]
    early = history["evaluation"] <= 2
    history["best_value"] = history["best_value"].mask(early, np.inf).mask(history["run"] == 1)
    history.loc[history["optimizer"] == "ga", "best_value"] *= 1e40
    history.loc[history["dataset"] == "broken", "best_value"] = np.nan
    drawn = _named({"study_history": history})
    assert list(drawn) == [f"{KINDS[i]}-corpus" for i in (0, 1, 2, 3, 6)]
    axes = drawn["best_by_evaluation-corpus"].figure.axes[0]
    assert axes.get_yscale() == "log"
    shown = history[(history["dataset"] == "corpus") & (history["optimizer"] == "unknown_one")]
    best = shown[shown["run"] != 1].pivot(index="evaluation", columns="run", values="best_value")
    assert_allclose(_at(_line(axes, "unknown_one"), np.arange(3, 13)), best.median(axis=1)[2:])


def test_the_regret_figure_draws_mean_and_band_of_both_methods() -> None:
    step = np.arange(5)
    parts = [
        pd.DataFrame({"trial_id": "a", "stage": "evaluate_small", "method": method, "step": step,
                      "mean": mean, "low": mean * 0.9, "high": mean * 1.1})
        for method, mean in (("pabbo", 1 / (step + 1)), ("random", 1 / (step + 1) ** 0.5))
    ]  # fmt: skip
    drawn = figures({"regret": pd.concat(parts)})
    assert [figure.name for figure in drawn] == ["regret-evaluate_small"]
    axes = drawn[0].figure.axes[0]
    assert_allclose(_line(axes, "pabbo_small").get_ydata(), 1 / (step + 1))
    assert_allclose(_line(axes, "random").get_xdata(), step)
    corners = axes.collections[1].get_paths()[0].vertices
    assert corners[:, 1].max() == pytest.approx(1.1)


def test_missing_and_empty_tables_leave_figures_out() -> None:
    tables = _tables(["corpus"], ["ga"], 1)
    assert figures({}) == []
    assert figures({name: table.iloc[:0] for name, table in tables.items()}) == []
    assert [f.name for f in figures({"summary": tables["summary"]})] == ["final_bars-corpus"]


def test_shares_of_runs_that_came_close_count_the_censored_ones() -> None:
    reached = pd.DataFrame(
        {
            "dataset": ["one"] * 4 + ["other"] * 2,
            "optimizer": ["ga"] * 4 + ["tpe"] * 2,
            "evaluations_beyond_start_to_1_percent": [3, 8, None, 3, 0, None],
            "evaluations": 30,
            "start_evaluations": 20,
        }
    )
    drawn = _named({"convergence": reached})
    assert list(drawn) == ["solved-one", "solved-other", "solved-all corpora"]
    axes = drawn["solved-all corpora"].figure.axes[0]
    at, share = [0, 2, 3, 7, 8, 10], [0, 0, 0.5, 0.5, 0.75, 0.75]
    assert_allclose(_at(_line(axes, "ga"), np.array(at)), share)
    assert_allclose(_at(_line(axes, "tpe"), np.array([0, 10])), 0.5)


def test_the_excess_is_relative_to_the_best_known_of_each_seed() -> None:
    tables = _tables(["corpus"], ["ga", "tpe"], 5)
    axes = _named(tables)["excess_by_evaluation-corpus"].figure.axes[0]
    table = tables["study_history"]
    known = table.groupby("seed")["value"].transform("min")
    excess = (table["best_value"] / known - 1).clip(lower=1e-3)
    best = table.assign(excess=excess)[table["optimizer"] == "ga"].pivot(
        index="evaluation", columns="run", values="excess"
    )
    assert_allclose(_at(_line(axes, "ga"), np.arange(1, 13)), best.median(axis=1))


def test_times_of_very_many_evaluations_are_thinned_and_the_curves_stay_the_same(monkeypatch):
    draw = np.random.default_rng(0)
    runs = []
    for run in range(6):
        value = np.minimum.accumulate(draw.random(50))
        about = {"run": run, "evaluation": np.arange(1, 51), "elapsed": draw.random(50).cumsum()}
        runs.append(pd.DataFrame({**about, "best_value": value}))
    table = pd.concat(runs, ignore_index=True)
    whole = convergence_figures.best_of(table, "elapsed")
    monkeypatch.setattr(convergence_figures, "_POINTS", 40)
    thinned = convergence_figures.best_of(table, "elapsed")
    assert 30 < len(thinned) <= 40
    assert thinned.index[-1] == whole.index[-1] == table["elapsed"].max()
    pd.testing.assert_frame_equal(thinned, whole.loc[thinned.index])
