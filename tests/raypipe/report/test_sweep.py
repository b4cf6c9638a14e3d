from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.testing import assert_allclose

from raypipe.report.plots import Plot
from raypipe.report.sections import Heading
from raypipe.report.sweep_section import sweep_section
from raypipe.report.sweep_trials import sweeps
from raypipe.report.training import training_plots
from tests.raypipe.report.sweep_tables import (
    KINDS,
    STAGE,
    Tables,
    plots_by_kind,
    plots_of,
    quality_tables,
    stored,
    systems_tables,
    texts,
    trial_row,
)


def _cell_texts(axes: Axes) -> dict[tuple[str, str], str]:
    """What is written in the heat map's cells, by micro-batch and precision."""
    across = [label.get_text() for label in axes.get_xticklabels()]
    down = [label.get_text() for label in axes.get_figure().axes[0].get_yticklabels()]
    cells = ((text.get_position(), text.get_text()) for text in axes.texts)
    return {(down[round(y)], across[round(x)]): text for (x, y), text in cells}


def test_without_a_sweep_there_are_no_figures() -> None:
    tables = systems_tables()
    own = tables["trials"].assign(stage=STAGE)
    assert plots_of({}) == []
    assert plots_of({"trials": own.iloc[:0]}) == []
    assert plots_of({"trials": own, "steps": tables["steps"]}) == []


def test_a_sweep_of_systems_has_three_figures() -> None:
    figures = plots_by_kind(systems_tables())
    assert tuple(figures) == KINDS
    section = sweep_section(stored(systems_tables()))
    names = [part.name if isinstance(part, Plot) else part for part in section.parts]
    assert names[0] == Heading(STAGE)
    assert [f"sweep-{kind}-{STAGE}" for kind in KINDS] == names[3:6]


def test_the_heat_map_is_the_best_speed_of_each_cell_or_the_reason_for_none() -> None:
    tables = systems_tables()
    slower = tables["trials"].assign(
        trial_id=lambda t: t["trial_id"] + "b", accumulation=2,
        samples_per_s=lambda t: t["samples_per_s"] / 2,
        point=[json.dumps({**json.loads(p), f"{STAGE}.training.accumulation": 2})
               for p in tables["trials"]["point"]],
    )  # fmt: skip
    point = f"{STAGE}.training.accumulation"
    first = tables["trials"].assign(
        point=[json.dumps({**json.loads(p), point: 1}) for p in tables["trials"]["point"]]
    )
    tables["trials"] = pd.concat([slower, first], ignore_index=True)
    figure = plots_by_kind(tables)["speed"]
    off, on = figure.figure.axes
    assert (off.get_title(loc="left"), on.get_title(loc="left")) == (
        "samples/s, checkpointing off", "samples/s, checkpointing on",
    )  # fmt: skip
    best = first.set_index(["gradient_checkpointing", "micro_batch", "precision"])
    for axes, checkpointing in ((off, False), (on, True)):
        cells = _cell_texts(axes)
        assert len(cells) == 10
        for (size, precision), text in cells.items():
            row = best.loc[(checkpointing, int(size), precision)]
            words = {"out_of_memory": "OOM", "skipped": "skipped"}
            assert text == words.get(row["status"], f"{row['samples_per_s']:.3g}")
    assert "the best over accumulation." in figure.caption
    assert "OOM: ran out of memory; skipped: not run" in figure.caption
    assert figure.title == "Fastest: bf16, micro-batch 128, 345.9 samples/s"


def test_the_recommended_cell_is_outlined_and_bold() -> None:
    off, on = plots_by_kind(systems_tables())["speed"].figure.axes

    def outlines(axes: Axes) -> list[Rectangle]:
        return [p for p in axes.patches if isinstance(p, Rectangle) and p.get_linewidth() > 1.5]

    [outline] = outlines(off)
    assert outlines(on) == []
    x, y = outline.get_x() + 0.5, outline.get_y() + 0.5
    [bold] = [text for text in off.texts if text.get_fontweight() == "bold"]
    assert bold.get_position() == (round(x), round(y)) == (1, 3)
    assert off.get_yticklabels()[3].get_text() == "128"


def test_a_failed_trial_has_no_speed_even_if_it_measured_one() -> None:
    tables = systems_tables()
    tables["trials"].loc[0, ["status", "samples_per_s"]] = ["failed", 9999.0]
    figures = plots_by_kind(tables)
    assert _cell_texts(figures["speed"].figure.axes[0])["16", "fp32"] == "failed"
    assert "9999" not in figures["speed"].title
    assert figures["pareto"].figure.axes[0].get_ylim()[1] < 1000


def test_repeated_measurements_are_one_point_with_the_median() -> None:
    point = {"micro_batch": 4, "precision": "fp32"}
    first = trial_row(0, point, samples_per_s=10.0)
    again = [trial_row(n, point, samples_per_s=speed, repeats=first["trial_id"])
             for n, speed in ((1, 30.0), (2, 14.0))]  # fmt: skip
    [sweep] = sweeps({"trials": pd.DataFrame([first, *again])})
    assert list(sweep.trials["trial_id"]) == [first["trial_id"]]
    assert list(sweep.trials["samples_per_s"]) == [14.0]


def test_many_micro_batches_share_rows_by_octave() -> None:
    rows = [
        trial_row(i, {"micro_batch": size, "precision": "fp32"}, samples_per_s=float(size))
        for i, size in enumerate(range(2, 32))
    ]
    [figure] = plots_of({"trials": pd.DataFrame(rows)})
    axes = figure.figure.axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["2 to 3", "4 to 7", "8 to 15", "16 to 31"]
    assert texts(axes) == ["3", "7", "15", "31"]


def test_learning_curves_show_every_trial_and_where_it_ended() -> None:
    figures = plots_by_kind(quality_tables())
    assert list(figures) == ["pareto", "curves"]
    [axes] = figures["curves"].figure.axes
    curves = [line for line in axes.lines if line.get_marker() == "None"]
    ends = [line for line in axes.lines if line.get_marker() != "None"]
    assert len(curves) == 12
    assert [max(line.get_xdata()) for line in curves].count(300) == 4
    assert [list(line.get_xdata()) for line in ends] == [[100]] * 8
    assert [line.get_linewidth() > 1 for line in curves] == [True] + [False] * 11
    caption = "12 trials, running median of the logged loss. 8 ended early, where their marks are."
    assert figures["curves"].caption == f"{caption} Recommended: learning rate 0.1."


def test_the_curves_are_of_the_metric_where_it_is_logged() -> None:
    tables = quality_tables()
    tables["recommendations"]["metric"] = "eval_loss"
    figure = plots_by_kind(tables)["curves"]
    [axes] = figure.figure.axes
    assert axes.get_title(loc="left") == "eval loss (lower is better)"
    assert texts(axes) == ["recommended"]
    assert_allclose(axes.lines[0].get_data(), ([100, 200, 300], [2, 2, 2]))
    assert figure.title == "The recommended trial ends at eval loss 2"


def test_where_more_is_better_the_recommended_curve_is_whole() -> None:
    """Of a metric such as an accuracy the worst trials may be cut off, and the best never are."""
    tables = quality_tables()
    chosen = tables["trials"]["trial_id"].iloc[-1]  # with the highest eval_loss, as an accuracy
    tables["recommendations"] = tables["recommendations"].assign(
        metric="eval_loss", mode="max", trial_id=chosen
    )
    axes = plots_by_kind(tables)["curves"].figure.axes[0]
    low, high = axes.get_ylim()
    steps = tables["steps"].dropna(subset=["eval_loss"])
    assert low < steps.loc[steps["trial_id"] == chosen, "eval_loss"].min()
    assert high > steps["eval_loss"].max()
    assert axes.get_title(loc="left") == "eval loss (higher is better)"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_quality_and_speed_are_on_one_front(mode: str) -> None:
    tables = quality_tables()
    trials = tables["trials"].assign(status="succeeded")
    count = len(trials)
    quality = np.linspace(1, 2, count)
    trials = trials.assign(
        accuracy=quality, samples_per_s=100.0 + np.arange(count) * (-1) ** (mode == "max")
    )
    best = trials["trial_id"].iloc[-1 if mode == "max" else 0]
    tables["trials"] = trials
    tables["pareto"] = trials[["trial_id"]]
    tables["recommendations"] = tables["recommendations"].assign(
        metric="accuracy", mode=mode, trial_id=best
    )
    plot = plots_by_kind(tables)["pareto"]
    first, memory = plot.figure.axes
    assert first.get_xlabel() == ("accuracy   better →" if mode == "max" else "← better   accuracy")
    [line] = [line for line in first.lines if line.get_label() == "_front"]
    assert len(np.unique(line.get_xdata())) == count  # they trade quality for speed
    low, high = first.get_xlim()
    assert low < 1 < 2 < high
    assert texts(first)[0] == texts(memory)[0] == "recommended"
    assert plot.title.startswith("The recommendation: accuracy")
    assert "speed, quality and memory at once" in plot.caption or "Opaque" not in plot.caption


def test_one_diverged_trial_does_not_flatten_the_others() -> None:
    tables = quality_tables()
    worst = tables["trials"]["trial_id"].iloc[-1]
    steps = tables["steps"]
    steps.loc[steps["trial_id"] == worst, "loss"] *= 1e6
    assert plots_by_kind(tables)["curves"].figure.axes[0].get_ylim()[1] < 10


def test_parity_is_drawn_for_each_precision_in_percent() -> None:
    tables = systems_tables()
    reference = trial_row(99, {"micro_batch": 16, "precision": "fp32"}, reference=True)
    tables["trials"] = pd.concat([tables["trials"], pd.DataFrame([reference])])
    steps = tables["steps"][tables["steps"]["trial_id"] == tables["trials"]["trial_id"].iloc[0]]
    same = steps.assign(trial_id=reference["trial_id"])
    tables["steps"] = pd.concat([tables["steps"], same])
    figure = plots_by_kind(tables)["curves"]
    losses, strip = figure.figure.axes
    assert [line.get_linestyle() for line in losses.lines].count("--") == 1
    assert [label.get_text() for label in strip.get_xticklabels()] == ["bf16"]
    points = np.concatenate([c.get_offsets() for c in strip.collections])
    count = int(tables["trials"]["parity"].notna().sum())
    assert_allclose(points[:, 1], np.full(count, 0.2))
    assert figure.title == "Losses are at most 0.2 % from fp32's"


def test_a_reference_is_no_point_of_the_sweep() -> None:
    tables = systems_tables([False])
    trials = tables["trials"]
    trials["reference"] = trials["precision"] == "fp32"
    figures = plots_by_kind(tables)
    columns = [label.get_text() for label in figures["speed"].figure.axes[0].get_xticklabels()]
    assert columns == ["bf16"]
    assert "4 trials" in figures["pareto"].caption


MEASURES = ["samples_per_s", "gpu_peak_bytes", "host_peak_bytes", "energy_j_per_sample", "parity"]


def _kinds(tables: Tables) -> list[str]:
    return list(plots_by_kind(tables))


def test_degenerate_sweeps_lose_figures_and_raise_nothing() -> None:
    whole = systems_tables()
    trials, steps = whole["trials"], whole["steps"]
    everything = list(KINDS)
    only = ["trial_id", "stage", "status"]
    failed = trials.assign(status="failed", **dict.fromkeys(MEASURES))
    assert _kinds({**whole, "trials": failed}) == ["speed"]
    assert _kinds({**whole, "trials": trials.iloc[:1], "steps": steps}) == []
    assert _kinds({**whole, "trials": trials[trials["precision"] == "bf16"]}) == everything
    assert _kinds({"trials": trials.drop(columns=[*MEASURES, "point", "kind"])}) == ["speed"]
    assert _kinds({**whole, "trials": trials.assign(**dict.fromkeys(MEASURES, np.nan))}) == [
        "speed"
    ]
    assert plots_of({"trials": trials[only]}) == []
    assert _kinds({"trials": trials}) == everything
    infinite = trials.assign(samples_per_s=np.inf, gpu_peak_bytes=-np.inf)
    assert "speed" in _kinds({**whole, "trials": infinite})
    assert _kinds({**whole, "steps": steps.assign(loss=np.nan)}) == everything


@pytest.mark.parametrize("lost", MEASURES)
@pytest.mark.parametrize("how", ["missing", "null"])
def test_any_measure_may_be_unknown(lost: str, how: str) -> None:
    tables = systems_tables()
    trials = tables["trials"]
    changed = trials.drop(columns=lost) if how == "missing" else trials.assign(**{lost: None})
    kinds = _kinds({**tables, "trials": changed})
    assert "speed" in kinds
    assert ("curves" in kinds) == (lost != "parity")


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_no_table_with_gaps_stops_the_report(data: st.DataObject) -> None:
    tables = systems_tables()
    trials = tables["trials"].copy()
    chosen = st.lists(st.integers(0, len(trials) - 1), max_size=len(trials))
    for column in (*MEASURES, "micro_batch", "precision", "gradient_checkpointing"):
        gaps = data.draw(chosen)
        trials[column] = trials[column].astype(object)
        trials.loc[gaps, column] = None
    figures = plots_of({**tables, "trials": trials})
    assert {figure.name.split("-")[1] for figure in figures} <= set(KINDS)


def test_the_figures_of_the_stages_leave_the_sweep_out() -> None:
    tables = systems_tables()
    assert training_plots(tables) == []
    own = tables["steps"].iloc[:20].assign(trial_id="own")
    tables["steps"] = pd.concat([tables["steps"], own])
    tables["trials"] = pd.concat(
        [tables["trials"], pd.DataFrame([{"trial_id": "own", "stage": STAGE}])]
    )
    names = [figure.name for figure in training_plots(tables)]
    assert names == [f"loss-{STAGE}", f"throughput-{STAGE}"]
