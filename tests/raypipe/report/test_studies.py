"""Sections of sweeps, searches and races, from their tables."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.graph.tables import CORE
from raypipe.report.plots import Plot, encode, style
from raypipe.report.results import Declarations, RunResults, sweeps
from raypipe.report.sections import race_section, sweep_section, training_plots
from raypipe.store.tables import by_name
from tests.raypipe.report.page_reader import page_of

Tables = dict[str, pd.DataFrame]
STAGE, GIB = "train_medium", 2**30
MEASURES = ["samples_per_s", "gpu_peak_bytes", "host_peak_bytes", "parity"]
SPEED, FRONT = (
    f"sweep-{STAGE}-{name}"
    for name in (
        f"samples_per_s-{STAGE}.training.micro_batch-{STAGE}.training.precision",
        "front",
    )
)


def _trial(number: int, point: Mapping[str, object], **values: object) -> dict[str, object]:
    return {"trial_id": f"sweep/{STAGE}/{number:03x}", "stage": "sweep", "trained_stage": STAGE,
            "status": "succeeded", "accumulation": 1, "loss_final": 2.0, "repeats": None,
            "gpu_peak_bytes": None, "host_peak_bytes": 4e9, **point, **values}  # fmt: skip


def _sweep(
    trials: Sequence[Mapping[str, object]],
    axes: Sequence[str],
    kind: str = "systems",
    **recommendation: object,
) -> Tables:
    """The tables of a sweep with these trials, of which the recommended one has further values."""
    table = pd.DataFrame(trials)
    points = table[["trial_id", *axes]].rename(columns={n: f"{STAGE}.training.{n}" for n in axes})
    points = points.assign(kind=kind)
    best = pd.DataFrame([{"trained_stage": STAGE, **recommendation}] if recommendation else [])
    tables = {"trials": table, "sweep_points": points}
    return tables | ({"recommendations": best} if recommendation else {})


def systems_tables() -> Tables:
    """A sweep of micro-batch, precision and checkpointing that runs into 100 GiB."""
    trials, slopes, speeds = [], {"fp32": 1.5, "bf16": 0.75}, {"fp32": 90.0, "bf16": 400.0}
    for precision, on in product(slopes, (False, True)):
        slope, ran_out = slopes[precision] * (0.25 if on else 1), False
        for size in (16, 32, 64, 128, 256):
            point = {"micro_batch": size, "precision": precision, "gradient_checkpointing": on}
            peak, speed = 2 + slope * size, speeds[precision] * size / (size + 20)
            row = {"samples_per_s": speed * (0.8 if on else 1), "gpu_peak_bytes": peak * GIB,
                   "parity": 0.002}  # fmt: skip
            if peak > 100:
                status = "skipped" if ran_out else "out_of_memory"
                row = {"status": status, "reason": f"{peak:.0f} GiB needed"}
                ran_out = True
            trials.append(_trial(len(trials), point, **row))
    best = max(trials, key=lambda trial: trial.get("samples_per_s", 0.0))
    axes = ["micro_batch", "precision", "gradient_checkpointing"]
    return _sweep(
        trials, axes, trial_id=best["trial_id"], metric="samples_per_s", mode="max",
        value=best["samples_per_s"], reason="The <fastest> that fits.",
        snippet=f"# The reason.\n{STAGE}:\n  training:\n    micro_batch: 128\n",
    )  # fmt: skip


def quality_tables(chosen: int = 0, **recommendation: object) -> Tables:
    """Full trainings at 12 learning rates, of which a scheduler stops two in three."""
    trials, steps = [], []
    for i in range(12):
        last = 300 if i % 3 == 0 else 100
        status = "succeeded" if last == 300 else "interrupted"
        point = {"learning_rate": 10.0 ** -(1 + i / 4)}
        trials.append(_trial(i, point, status=status, samples_per_s=400.0))
        steps += [
            {"trial_id": trials[-1]["trial_id"], "step": step, "loss": 1 + i / 10 + 3 / step,
             "eval_loss": 2 + i if step % 100 == 0 else None}
            for step in range(10, last + 1, 10)
        ]  # fmt: skip
    given = {"metric": "loss_final", "mode": "min", **recommendation}
    tables = _sweep(
        trials, ["learning_rate"], "quality", trial_id=trials[chosen]["trial_id"], **given
    )
    return tables | {"steps": pd.DataFrame(steps)}


def _plots(tables: Tables) -> dict[str, Plot]:
    """The plots of a sweep by name; each must also be saved without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with style():
            parts = sweep_section(RunResults(tables)).parts
        plots = [part for part in parts if isinstance(part, Plot)]
        for plot in plots:
            encode(plot)
    return {plot.name: plot for plot in plots}


def _section(tables: Tables, name: str) -> str:
    page = page_of(RunResults(tables)).source
    return page.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def test_the_heat_map_is_the_best_speed_of_each_cell_or_the_reason_for_none() -> None:
    tables = systems_tables()
    plots = _plots(tables)
    assert {SPEED, FRONT} <= {*plots}
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


def test_a_sweep_counts_measured_points_once_and_no_failures() -> None:
    point = {"micro_batch": 4}
    trials = [_trial(0, point, samples_per_s=10.0)]
    trials += [_trial(n, point, samples_per_s=speed, repeats=trials[0]["trial_id"])
               for n, speed in ((1, 30.0), (2, 14.0))]  # fmt: skip
    trials.append(_trial(4, {"micro_batch": 8}, samples_per_s=9999.0, status="failed"))
    (sweep,) = sweeps(_sweep(trials, ["micro_batch"]))
    assert list(sweep.trials["trial_id"]) == [trials[0]["trial_id"], trials[3]["trial_id"]]
    np.testing.assert_array_equal(sweep.trials["samples_per_s"], [14.0, np.nan])
    assert sweep.axes == [f"{STAGE}.training.micro_batch"]


@pytest.mark.parametrize(("metric", "mode"), [("loss_final", "min"), ("eval_loss", "max")])
def test_learning_curves_show_every_trial_where_it_ended(metric: str, mode: str) -> None:
    """The worst trials may be cut off."""
    tables = quality_tables(metric=metric, mode=mode)
    column = metric.removesuffix("_final")
    plot = _plots(tables)[f"{column}-sweep of {STAGE}"]
    (axes,) = plot.figure.axes
    curves = [line for line in axes.lines if str(line.get_label())[:1] != "_"]
    assert [max(line.get_xdata()) for line in curves].count(300) == 4
    better = {"min": "lower", "max": "higher"}[mode]
    name = f"{STAGE}.training.learning_rate"
    assert plot.caption == f"12 trials, named by {name}; {better} is better."
    low, high = axes.get_ylim()
    assert low < tables["steps"][column].agg(mode) < high


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
    page_of(RunResults({**tables, "trials": trials}))


def test_the_page_recommends_and_folds_the_trials() -> None:
    tables = systems_tables()
    own = {"trial_id": "own", "stage": STAGE, "status": "failed"}
    tables["trials"] = pd.concat([tables["trials"], pd.DataFrame([own])])
    section = _section(tables, "sweep")
    assert "The &lt;fastest&gt; that fits." in section
    assert f"{STAGE}:\n  training:\n    micro_batch: 128</code>" in section
    assert "# The reason." not in section
    before, trials = section.split("<details>")
    assert "<table" not in before
    assert "All 20 trials of train_medium: 17 succeeded, 2 out of memory, 1 skipped" in trials
    assert trials.count("<tr") == 21
    assert re.findall("<tr[^>]*>", trials)[:3] == ["<tr>", '<tr class="first">', "<tr>"]
    assert "194 GiB needed" in trials
    assert "sweep/" not in _section(tables, "training-runs")
    assert "own" in _section(tables, "training-runs")
    alone = {name: tables[name] for name in ("trials", "sweep_points")}
    assert "No trial of train_medium can be recommended." in _section(alone, "sweep")


def _training_plots(tables: Tables) -> list[str]:
    run = RunResults(tables, declared=Declarations(core=by_name(CORE)))
    return [plot.name for plot in training_plots(run)]


def test_the_figures_of_the_stages_leave_the_sweep_out() -> None:
    tables = quality_tables()
    assert _training_plots(tables) == []
    own = tables["steps"].iloc[:20].assign(trial_id="own")
    tables["steps"] = pd.concat([tables["steps"], own])
    row = pd.DataFrame([{"trial_id": "own", "stage": STAGE}])
    tables["trials"] = pd.concat([tables["trials"], row])
    assert _training_plots(tables) == [f"eval_loss-{STAGE}", f"loss-{STAGE}"]


def test_a_race_shows_where_each_point_was_dropped() -> None:
    rows = [
        {"round": number, "point": json.dumps({"fit.layers": layers}), "runs": 5 + number,
         "mean": layers + number / 10, "status": status, "p_holm": 0.01}
        for layers, statuses in ((1, ["contender", "winner"]), (2, ["contender", "dropped"]),
                                 (3, ["dropped"]))
        for number, status in enumerate(statuses, 1)
    ]  # fmt: skip
    race = pd.DataFrame(rows)
    text, view, fold = race_section(race).parts
    assert text == "3 points, 2 rounds, up to 7 seeds. fit.layers=1 wins with a mean of 1.2."
    assert list(view.rows["last_round"]) == [2, 2, 1]  # type: ignore[union-attr]
    assert fold.title == "Configuration of the winner"  # type: ignore[union-attr]
    undecided = race.assign(status=race["status"].where(race["round"] == 1, "contender"))
    assert "Undecided between 2 points" in str(race_section(undecided).parts[0])


def _search(metrics: dict[str, list[float]]) -> str:
    points = pd.DataFrame(
        {"number": n, "point": json.dumps({"a.x": n / 10, "a.kind": "bc"[n % 2]}), "ended": n,
         "status": "succeeded", "feasible": n != 3, "on_front": n == 4,
         "objectives": json.dumps(dict.fromkeys(metrics, "min"))}
        for n in range(6)
    )  # fmt: skip
    points = points.assign(**metrics)
    stages = pd.DataFrame({"run_id": "r", "stage": ["s"], "status": "succeeded", "device": "cpu",
                           "started_at": pd.Timestamp("2026-03-02", tz="UTC"),
                           "duration_s": 1.0})  # fmt: skip
    return page_of(RunResults({"search": points, "stages": stages}, "search")).source


COST = [5.0, 4.0, 6.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("metrics", "texts"),
    [
        ({"calls.cost": COST},
         ("6 points proposed (1 break a condition).", "Point 5 is the best: 2",
          "the best so far that meets all conditions", "Configuration of point 5: calls.cost 2",
          "x: 0.4", "x=0.4, b; lowest of 5")),
        ({"calls.cost": COST, "calls.time": COST[::-1]},
         ("calls.cost and calls.time", "5 points. The line joins those that no other",
          "calls.time, lower is better")),
    ],
    ids=["one metric", "two"],
)  # fmt: skip
def test_a_search_shows_the_way_to_its_best_points(
    metrics: dict[str, list[float]], texts: tuple[str, ...]
) -> None:
    page = _search(metrics)
    for text in texts:
        assert text in page, text
