from __future__ import annotations

import json
import re

import pandas as pd

from raypipe.report.page import report_files
from tests.raypipe.report.sweep_tables import (
    STAGE,
    Tables,
    plots_of,
    systems_tables,
    trial_row,
)


def _page(tables: Tables) -> str:
    return report_files(tables, [], "A sweep", {})["index.html"].decode()


def _section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}"')[2].partition("</section>")[0]


def test_the_page_recommends_and_folds_everything_else() -> None:
    tables = systems_tables()
    tables["trials"] = pd.concat(
        [tables["trials"], pd.DataFrame([{"trial_id": "own", "stage": STAGE, "status": "failed"}])]
    )
    tables["recommendations"]["snippet"] = "# The reason.\n" + tables["recommendations"]["snippet"]
    page = _page(tables)
    section = _section(page, "sweep")
    assert "The &lt;fastest&gt; that fits." in section
    assert f"{STAGE}:\n  training:\n    micro_batch: 128</code>" in section
    assert "# The reason." not in section
    before, *folds = section.split("<details>")
    assert "<table" not in before
    front, trials = folds
    assert "Pareto front: 1 trial that is not beaten" in front
    assert "All 20 trials: 17 succeeded, 2 out of memory, 1 skipped" in trials
    assert trials.count("<tr") == 21
    assert re.findall("<tr[^>]*>", trials)[:3] == ["<tr>", '<tr class="first">', "<tr>"]
    assert "194 GiB needed" in trials
    assert "sweep/" not in _section(page, "training-runs")
    assert "own" in _section(page, "training-runs")


def test_a_sweep_without_a_recommendation_says_so() -> None:
    tables = systems_tables()
    assert "No trial of train_medium can be recommended." in _page({"trials": tables["trials"]})
    assert 'id="training-runs"' not in _page(tables)


def test_running_out_of_memory_in_a_sweep_is_no_alarm() -> None:
    failures = pd.DataFrame(
        {"stage": ["sweep", "sweep", STAGE], "unit": ["a", "b", "c"], "attempt": 1,
         "kind": ["out_of_memory", "error", "out_of_memory"], "message": ["m1", "m2", "m3"]}
    )  # fmt: skip
    section = _section(_page({"failures": failures}), "failures")
    assert "2 attempts failed: error (1), out of memory (1)." in section
    assert "m1" not in section
    assert 'id="failures"' not in _page({"failures": failures.iloc[:1]})


def _with_sweep_points(tables: Tables) -> Tables:
    """The tables of today: the points are a table with a column per axis."""
    trials = tables["trials"]
    points = pd.DataFrame([json.loads(text) for text in trials["point"]])
    points.insert(0, "trial_id", trials["trial_id"].to_numpy())
    # another stage's axis
    points["other.training.seed"] = None
    about = ["trained_stage", "kind", "reference"]
    points[about] = trials[about].to_numpy()
    return {
        **tables,
        "trials": trials.drop(columns=["point", *about]),
        "pareto": tables["pareto"].drop(columns="point"),
        "recommendations": tables["recommendations"].drop(columns="settings"),
        "sweep_points": points,
    }


def test_a_sweep_reads_its_points_from_columns_and_from_the_json_of_earlier_versions() -> None:
    earlier = systems_tables()
    extra = trial_row(99, {"micro_batch": 8, "precision": "fp32"}, reference=True)
    earlier["trials"] = pd.concat([earlier["trials"], pd.DataFrame([extra])], ignore_index=True)
    today = _with_sweep_points(earlier)
    sections = [_section(_page(tables), "sweep") for tables in (earlier, today)]
    assert sections[0] == sections[1]
    assert "checkpointing" in sections[0]
    plots = [[plot.caption for plot in plots_of(tables)] for tables in (earlier, today)]
    assert plots[0] == plots[1]
    assert len(plots[0]) == 3
