"""Sections of sweeps, searches, races and matrices, from their tables."""

from __future__ import annotations

import json
import re
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from raypipe.report.plots import Plot, encode
from raypipe.report.sections import Fold, TableView
from raypipe.report.studies import race_section, sweep_section, sweeps
from raypipe.report.trainings import training_plots
from tests.raypipe.report.page_reader import report_files
from tests.raypipe.report.sweep_tables import (
    STAGE,
    Tables,
    quality_tables,
    stored,
    systems_tables,
    trial_row,
)

MEASURES = ["samples_per_s", "gpu_peak_bytes", "host_peak_bytes", "energy_j_per_sample", "parity"]
SPEED, MEMORY = f"sweep-{STAGE}-samples_per_s-heat", f"sweep-{STAGE}-memory-front"
ENERGY, CURVES = f"sweep-{STAGE}-energy_per_sample_j-front", f"sweep-{STAGE}-curves"


def _plots(tables: Tables) -> dict[str, Plot]:
    """The plots of a sweep by name; each must also be saved without a warning."""
    tables = stored(tables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots = [p for p in sweep_section(tables, sweeps(tables)).parts if isinstance(p, Plot)]
        for plot in plots:
            encode(plot)
    return {plot.name: plot for plot in plots}


def test_the_heat_map_is_the_best_speed_of_each_cell_or_the_reason_for_none() -> None:
    tables = systems_tables()
    plots = _plots(tables)
    assert {SPEED, MEMORY, ENERGY} < {*plots}
    axes = plots[SPEED].figure.axes[0]
    across, down = ([label.get_text() for label in labels]
                    for labels in (axes.get_xticklabels(), axes.get_yticklabels()))  # fmt: skip
    cells = {}
    for text in axes.texts:
        x, y = (round(place) for place in text.get_position())
        cells[down[y], across[x]] = text.get_text()
    best = tables["trials"].groupby(["micro_batch", "precision"])["samples_per_s"].max()
    assert len(cells) == 10
    for (size, precision), speed in best.items():
        found = cells[str(size), precision]
        assert found == "OOM" if np.isnan(speed) else float(found) == pytest.approx(speed, 0.01)
    assert "The best over gradient checkpointing." in plots[SPEED].caption


def test_a_failed_trial_has_no_speed_even_if_it_measured_one() -> None:
    tables = systems_tables()
    tables["trials"].loc[0, ["status", "samples_per_s"]] = ["failed", 9999.0]
    (sweep,) = sweeps(stored(tables))
    assert np.isnan(sweep.trials["samples_per_s"][0])
    assert _plots(tables)[MEMORY].figure.axes[0].get_ylim()[1] < 1000


def test_repeated_measurements_are_one_point_with_the_median() -> None:
    point = {"micro_batch": 4, "precision": "fp32"}
    first = trial_row(0, point, samples_per_s=10.0)
    again = [trial_row(n, point, samples_per_s=speed, repeats=first["trial_id"])
             for n, speed in ((1, 30.0), (2, 14.0))]  # fmt: skip
    (sweep,) = sweeps({"trials": pd.DataFrame([first, *again])})
    assert list(sweep.trials["trial_id"]) == [first["trial_id"]]
    assert list(sweep.trials["samples_per_s"]) == [14.0]


def test_learning_curves_show_every_trial_where_it_ended_and_the_recommended_one() -> None:
    plot = _plots(quality_tables())[CURVES]
    (axes,) = plot.figure.axes
    curves = [line for line in axes.lines if str(line.get_label())[:1] != "_"]
    assert [max(line.get_xdata()) for line in curves].count(300) == 4
    assert sum(line.get_marker() == "o" for line in axes.lines) == 8
    assert [line.get_label() for line in curves if line.get_linewidth() > 1] == ["recommended"]
    assert plot.caption == (
        "12 trials, named by learning_rate; lower is better. 8 ended early, where their marks are."
    )


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_curves_of_the_metric_show_the_best_and_the_recommended_as_a_whole(mode: str) -> None:
    """The worst trials may be cut off."""
    tables = quality_tables()
    chosen = tables["trials"]["trial_id"].iloc[-1]
    tables["recommendations"] = tables["recommendations"].assign(
        metric="eval_loss", mode=mode, trial_id=chosen
    )
    axes = _plots(tables)[CURVES].figure.axes[0]
    low, high = axes.get_ylim()
    steps = tables["steps"].dropna(subset=["eval_loss"])
    own = steps.loc[steps["trial_id"] == chosen, "eval_loss"]
    best = steps["eval_loss"].agg(mode)
    assert low < own.min() <= own.max() < high
    assert low < best < high
    assert axes.get_title(loc="left").startswith("held-out loss")


def test_a_reference_is_no_point_of_the_sweep() -> None:
    tables = systems_tables([False])
    tables["trials"]["reference"] = tables["trials"]["precision"] == "fp32"
    (sweep,) = sweeps(stored(tables))
    assert set(sweep.trials["precision"]) == {"bf16"}
    assert set(sweep.all_trials["precision"]) == {"bf16", "fp32"}


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
    tables = stored({**tables, "trials": trials})
    report_files(tables, [], "A sweep", {})


def _section(tables: Tables, name: str) -> str:
    page = report_files(stored(tables), [], "A sweep", {})["index.html"].decode()
    return page.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def test_the_page_recommends_and_folds_the_trials() -> None:
    tables = systems_tables()
    own = {"trial_id": "own", "stage": STAGE, "status": "failed"}
    tables["trials"] = pd.concat([tables["trials"], pd.DataFrame([own])])
    tables["recommendations"]["snippet"] = "# The reason.\n" + tables["recommendations"]["snippet"]
    section = _section(tables, "sweep")
    assert "The &lt;fastest&gt; that fits." in section
    assert f"{STAGE}:\n  training:\n    micro_batch: 128</code>" in section
    assert "# The reason." not in section
    before, trials = section.split("<details>")
    assert "<table" not in before
    assert "All 20 trials: 17 succeeded, 2 out of memory, 1 skipped; 1 on the Pareto" in trials
    assert trials.count("<tr") == 21
    assert re.findall("<tr[^>]*>", trials)[:3] == ["<tr>", '<tr class="first">', "<tr>"]
    assert "194 GiB needed" in trials
    assert "sweep/" not in _section(tables, "training-runs")
    assert "own" in _section(tables, "training-runs")
    alone = {"trials": systems_tables()["trials"]}
    assert "No trial of train_medium can be recommended." in _section(alone, "sweep")


def test_the_figures_of_the_stages_leave_the_sweep_out() -> None:
    tables = systems_tables()
    assert list(training_plots(tables)) == []
    own = tables["steps"].iloc[:20].assign(trial_id="own")
    tables["steps"] = pd.concat([tables["steps"], own])
    row = pd.DataFrame([{"trial_id": "own", "stage": STAGE}])
    tables["trials"] = pd.concat([tables["trials"], row])
    names = [figure.name for figure in training_plots(tables)]
    assert names == [f"loss-{STAGE}", f"throughput-{STAGE}"]


def test_a_race_shows_its_rounds_and_where_each_point_was_dropped() -> None:
    rows = [
        {"round": number, "point": json.dumps({"fit.layers": layers}), "runs": 5 + number,
         "mean": layers + number / 10, "status": status, "p_holm": 0.01}
        for layers, statuses in ((1, ["contender", "winner"]), (2, ["contender", "dropped"]),
                                 (3, ["dropped"]))
        for number, status in enumerate(statuses, 1)
    ]  # fmt: skip
    text, plot, view, fold = race_section({"race": pd.DataFrame(rows)}).parts
    assert text == "3 points, 2 rounds, up to 7 seeds. fit.layers=1 wins with a mean of 1.2."
    assert isinstance(plot, Plot)
    lines = [line for line in plot.figure.axes[0].lines if len(line.get_xdata()) > 1]
    assert_allclose(lines[0].get_data(), ([6, 7], [1.1, 1.2]))
    assert isinstance(view, TableView)
    assert list(view.rows["last_round"]) == [2, 2, 1]
    assert isinstance(fold, Fold)
    assert fold.title == "Configuration of the winner"
    undecided = pd.DataFrame(rows).replace({"winner": "contender", "dropped": "contender"})
    assert "Undecided between 2 points" in str(race_section({"race": undecided}).parts[0])


def test_a_search_shows_its_points_the_best_so_far_and_what_breaks_a_condition() -> None:
    points = pd.DataFrame(
        [
            {"number": n, "point": json.dumps({"a.x": n / 10, "a.kind": "bc"[n % 2]}),
             "status": "succeeded", "feasible": n != 3, "on_front": n == 4, "ended": n,
             "calls.cost": cost, "objectives": json.dumps({"calls.cost": "min"})}
            for n, cost in enumerate([5.0, 4.0, 6.0, 1.0, 2.0, 3.0])
        ]
    )  # fmt: skip
    stages = pd.DataFrame({"run_id": "r", "stage": ["s"], "status": "succeeded", "device": "cpu",
                           "started_at": pd.Timestamp("2026-03-02", tz="UTC"),
                           "duration_s": 1.0})  # fmt: skip
    files = report_files({"search": points, "stages": stages}, [], "search", {})
    page = files["index.html"].decode()
    for text in ("6 points proposed (1 break a condition).", "Point 5 is the best: 2",
                 "Crosses: 1 that break a condition.", "Configuration of point 5: calls.cost 2",
                 "x: 0.4", "x=0.4, b; lowest of 5"):  # fmt: skip
        assert text in page, text
    assert "figures/search-progress.svg" in files
