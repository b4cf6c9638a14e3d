"""Searches of a matrix: proposals, and graphs that grow from their outcomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.commands import configuration as config
from raypipe.commands.plan import work_of
from raypipe.config.matrix import SearchSettings
from raypipe.graph import runner
from raypipe.hardware import Gpu, Hardware
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Table, write_table
from raypipe.study.loop import Outcome
from raypipe.study.metric import Metric
from raypipe.study.search import Search
from tests.command import raypipe
from tests.raypipe.examples.hills import SEARCH, edit, killed, ran, run, table
from tests.scenario import cases

VALUE, SIZE = "measures.value (judge)", "measures.size (fit)"


@pytest.fixture(autouse=True)
def search(hill: Path) -> None:
    (hill / "hill.yaml").write_text(SEARCH)


def points(rows: pd.DataFrame) -> list[dict[str, Any]]:
    return [json.loads(point) for point in rows["point"]]


def test_a_search_shares_stages_and_finds_the_hill():
    run()
    assert ran() == {"prepare": 1, "fit": 12, "judge": 12}
    found = table("search")
    assert list(found["number"]) == list(range(12))
    assert set(found["status"]) == {"succeeded"}
    metric = found[VALUE]
    assert list(found["on_front"]) == list(metric == metric.min())
    judged = table("measures").query("method == 'judge'")
    assert sorted(judged["value"]) == sorted(metric)
    assert "nothing to do" in run()
    assert ran() == {}
    run("search.trials=14")  # more trials compute only what is new
    assert ran() == {"fit": 2, "judge": 2}
    kept = ["number", "point", "status", VALUE]
    pd.testing.assert_frame_equal(table("search")[kept].iloc[:12], found[kept])


def test_the_last_point_of_a_search_for_two_metrics_is_in_the_tables(monkeypatch):
    """Its outcome is recorded after its last stage, whose end is when tables are written."""
    monkeypatch.setattr(runner, "_SHARE", 0)  # as if stages took longer than the writing
    both = "{metric: measures.value, where: {method: judge}}, "
    both += "{metric: measures.size, where: {method: fit}, mode: max}"
    run(f"search.metrics=[{both}]", "search.trials=6", "search.concurrent=1", words=("--local",))
    found = table("search")
    front = found[found["on_front"]]
    assert len(front)
    for row in front.to_dict("records"):
        assert not ((found[SIZE] >= row[SIZE]) & (found[VALUE] < row[VALUE])).any()
    assert list(found["status"]) == ["succeeded"] * 6
    assert list(found["ended"]) == list(range(6))
    write_table(RunDirectory.at("run"), Table("search", "of a killed command"), [], "r")
    raypipe("report", "run")
    pd.testing.assert_frame_equal(table("search"), found)


def test_a_killed_or_interrupted_search_continues_as_if_nothing_had_happened():
    few = "search.trials=8"
    run(few, folder="whole")
    ran()
    Path("stop.txt").write_text("8")
    assert killed(lambda: run(few, folder="killed"))
    run(few, folder="killed")
    assert sum(ran().values()) == 1 + 16 + 1  # the one that was killed ran again
    for name in ("search", "measures", "variants"):
        pair = [table(name, folder) for folder in ("whole", "killed")]
        order = [c for c in ("number", "variant", "method", "key") if c in pair[0]]
        whole, again = (each.sort_values(order, ignore_index=True) for each in pair)
        pd.testing.assert_frame_equal(whole, again)
    Path("stop.txt").write_text("-90")
    run(few, expected=130)
    run(few)
    assert set(table("search")["status"]) == {"succeeded"}


def test_points_that_failed_are_tried_again_as_they_were():
    edit("s.layers == 13", "s.layers > 3")
    run(expected=1)
    found = table("search")
    bad = found[found["status"] == "failed"]
    assert set(found["status"]) == {"failed", "succeeded"}
    assert len(found) == 12
    assert bad["message"].str.contains("bad luck").all()
    edit("s.layers > 3", "s.layers == 13")
    run()
    again = table("search")
    assert set(again["status"]) == {"succeeded"}
    assert list(again["point"]) == list(found["point"])


def test_repetitions_and_fixed_axes_are_averaged():
    """A range with whole ends of a key of real numbers is real."""
    axis = "search.axes.fit.rate={low: 1, high: 4}"
    run("runs=2", "prepare.length=[1,2]", "search.trials=3", axis)
    assert ran() == {"prepare": 2, "fit": 12, "judge": 12}
    found = table("search")
    judged = table("measures").query("method == 'judge'")
    for point, value in zip(points(found), found[VALUE], strict=True):
        assert not point["fit.rate"].is_integer()
        assert isinstance(point["fit.layers"], int)
        own = judged[judged["variant"].str.contains(f"fit.rate={point['fit.rate']},", regex=False)]
        assert (len(own), own["value"].mean()) == (4, pytest.approx(value))


@pytest.mark.parametrize(("cards", "keys", "most"), cases(__file__, "at_once"))
def test_as_many_points_run_at_once_as_there_are_devices(cards, keys, most):
    node = Hardware("here", 8, 2**35, (Gpu(0, "GPU-1", "Card", 2**33, "9.0"),) * cards)
    document, given = config.parse(SEARCH, "hill.yaml"), ("matrix.search.concurrent=null", *keys)
    graph = work_of(config.resolve(document, given, "auto", [node]), (), [node]).graph
    assert len(graph.source(None).ask()) == most


# the source of proposals alone

LOSS, SIZES = Metric("measures", "loss", {}), Metric("measures", "size", {}, "max")
TWO = {"metrics": [{"metric": "measures.loss"}, {"metric": "measures.size"}]}


def drive(rows: dict[str, Any] | None = None, steps: int = 10**6, **given: Any) -> dict[str, Any]:
    """Let proposals end in the order in which they were asked; return the rows."""
    ranges = {"a": {"low": 0.0, "high": 1.0}, "b": {"low": 1, "high": 64, "log": True}}
    plain = {"axes": ranges, "metrics": [{"metric": "measures.loss"}], "trials": 20}
    section = SearchSettings.model_validate({**plain, **given})
    metrics = [LOSS, SIZES][: len(section.metrics)]
    search = Search(section, metrics, section.concurrent or 3, rows or {})
    running = search.ask()
    while running and steps:
        (point,) = search.points(key := running.pop(0))
        loss = (point["a"] - 0.3) ** 2 + point["b"] / 100
        found = {LOSS.name: loss, SIZES.name: float(point["b"])}
        outcome = Outcome(failure="no luck") if point["b"] % 7 == 0 else Outcome(found)
        search.tell(key, outcome)
        running += search.ask()
        steps -= 1
    assert running or search.is_over
    return json.loads(json.dumps(search.rows()))


@pytest.mark.parametrize("kind", [{"sampler": "tpe"}, {"sampler": "random"}, TWO])
@settings(max_examples=3, deadline=None)
@given(cut=st.integers(0, 25), concurrent=st.integers(1, 5))
def test_a_search_from_stored_rows_equals_an_uninterrupted_one(kind, cut, concurrent):
    whole = drive(concurrent=concurrent, **kind)
    half = drive(steps=cut, concurrent=concurrent, **kind)
    again = drive(half, concurrent=concurrent, **kind)
    assert again == whole
    failed = [key for key, row in half.items() if row["status"] == "failed"]
    assert all(again[key]["status"] == "failed" for key in failed)


def test_samplers_continue_and_learn():
    surrogate = {"sampler": "gp", "trials": 14, "concurrent": 1}
    assert drive(drive(steps=12, **surrogate), **surrogate) == drive(**surrogate)
    best = {"tpe": 0.0, "random": 0.0}
    for name in best:
        for seed in range(3):
            rows = drive(sampler=name, trials=40, seed=seed, concurrent=1).values()
            best[name] += min(row[LOSS.name] for row in rows if row["status"] == "succeeded")
    assert best["tpe"] < best["random"]
