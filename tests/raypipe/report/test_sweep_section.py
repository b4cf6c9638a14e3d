from __future__ import annotations

import re

import pandas as pd

from raypipe.report.page import report_files
from tests.raypipe.report.sweep_tables import (
    STAGE,
    Tables,
    stored,
    systems_tables,
)


def _page(tables: Tables) -> str:
    return report_files(stored(tables), [], "A sweep", {})["index.html"].decode()


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
