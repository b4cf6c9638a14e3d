"""Searches of a matrix: proposals, and graphs that grow from their outcomes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.config.search import SearchSettings
from raypipe.graph import runner
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Table, read_table, write_table
from raypipe.study.loop import Outcome
from raypipe.study.metric import Measured, Metric
from raypipe.study.search import Bound, Search
from tests.raypipe.toy import raypipe

HILL = """
import os
import signal
from pathlib import Path

from raypipe.config.settings import Settings
from raypipe.graph.experiment import Experiment, Stage
from raypipe.store.tables import Column, Table


class Prepare(Settings):
    length: int = 3


class Fit(Settings):
    seed: int = 5
    rate: float = 1.0
    layers: int = 2
    steps: int = 10


class Hill(Settings):
    prepare: Prepare = Prepare()
    fit: Fit = Fit()


def note(context):
    with Path("ran.txt").open("a") as stream:
        stream.write(context.stage.name + "\\n")
    stop = Path("stop.txt")
    if stop.exists():
        left = int(stop.read_text()) - 1
        stop.write_text(str(left))
        if left == 0:
            stop.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if left == -100:
            stop.unlink()
            raise KeyboardInterrupt


def prepare(context):
    note(context)


def fit(context):
    note(context)
    s = context.settings.fit
    if s.layers == 13:
        raise RuntimeError("bad luck")
    value = (s.rate - 2.0) ** 2 + abs(s.layers - 3) + (s.seed % 1000) * 0.0 + 10.0 / s.steps
    value += 0.01 * (s.seed // 1000)
    context.ledger.put("measures", {"fit": {"method": "fit", "value": value, "size": s.layers}})


def judge(context):
    note(context)
    (row,) = [row for row in context.ledger.rows("measures") if row["method"] == "fit"]
    context.ledger.put("measures", {"judge": {"method": "judge", "value": 2 * row["value"]}})


def stages(settings):
    return [
        Stage("prepare", prepare, reads=("prepare",)),
        Stage("fit", fit, needs=("prepare",), reads=("fit",)),
        Stage("judge", judge, needs=("fit",), reads=()),
    ]


MEASURES = Table(
    "measures",
    "a method",
    (
        Column("method", "text", "The method."),
        Column("value", "real", "Its loss.", better="lower"),
        Column("size", "integer", "Its size."),
    ),
)
EXPERIMENT = Experiment("hill", 1, Hill, stages, tables=(MEASURES,))
"""

SEARCH = """
experiment: hill
matrix:
  search:
    axes:
      fit.rate: {low: 0.5, high: 8, log: true}
      fit.layers: {low: 1, high: 6}
    metrics:
      - {metric: measures.value, where: {method: judge}}
    trials: 12
    concurrent: 3
"""


@pytest.fixture
def hill(work: Path) -> Iterator[Path]:
    (work / "hill.py").write_text(HILL)
    (work / "hill.yaml").write_text(SEARCH)
    yield work
    sys.modules.pop("hill", None)


def ran(folder: Path) -> dict[str, int]:
    """Return how often each stage ran since the last call."""
    file = folder / "ran.txt"
    names = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return {name: names.count(name) for name in dict.fromkeys(names)}


def table(folder: Path, name: str) -> pd.DataFrame:
    found = read_table(RunDirectory.at(folder), name)
    return found.drop(columns=["run_id", "command_id"], errors="ignore")


def killed(command: Callable[[], int]) -> bool:
    """Run a command in a forked process; return whether SIGKILL ended it."""
    if (child := os.fork()) == 0:
        os._exit(command())
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_a_search_shares_stages_and_finds_the_hill(hill, capsys):
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    assert ran(hill) == {"prepare": 1, "fit": 12, "judge": 12}
    found = table(hill / "run", "search")
    assert list(found["number"]) == list(range(12))
    assert set(found["status"]) == {"succeeded"}
    metric = found["measures.value (judge)"]
    assert list(found["best"]) == list(metric.cummin())
    assert list(found["on_front"]) == list(metric == metric.min())
    best = json.loads(found.loc[metric.idxmin(), "point"])
    judged = table(hill / "run", "measures").query("method == 'judge'")
    assert sorted(judged["value"]) == sorted(metric)
    page = (hill / "run/report/index.html").read_text()
    assert "rate: " + str(best["fit.rate"]) in page
    capsys.readouterr()
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert ran(hill) == {}


def test_the_last_point_of_a_search_is_in_the_tables(hill, monkeypatch):
    """Its outcome is recorded after its last stage, whose end is when tables are written."""
    monkeypatch.setattr(runner, "_SHARE", 0)  # as if stages took longer than the writing
    options = ("--local", "--matrix", "search.trials=4", "--matrix", "search.concurrent=1")
    assert raypipe("run", "hill.yaml", *options, "--run-dir", "run") == 0
    found = table(hill / "run", "search")
    assert list(found["status"]) == ["succeeded"] * 4
    assert list(found["ended"]) == [0, 1, 2, 3]
    write_table(RunDirectory.at(hill / "run"), Table("search", "of a killed command"), [], "r")
    assert raypipe("report", "run") == 0
    pd.testing.assert_frame_equal(table(hill / "run", "search"), found)


def test_more_trials_compute_only_what_is_new(hill):
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    before = table(hill / "run", "search")
    ran(hill)
    more = ("--matrix", "search.trials=14")
    assert raypipe("run", "hill.yaml", *more, "--run-dir", "run") == 0
    assert ran(hill) == {"fit": 2, "judge": 2}
    after = table(hill / "run", "search")
    kept = ["number", "point", "status", "measures.value (judge)"]
    pd.testing.assert_frame_equal(after[kept].iloc[:12], before[kept])


@pytest.mark.parametrize("after", [2, 9, 20])
def test_a_killed_search_continues_as_if_nothing_had_happened(hill, after):
    assert raypipe("run", "hill.yaml", "--run-dir", "whole") == 0
    ran(hill)
    (hill / "stop.txt").write_text(str(after))
    assert killed(lambda: raypipe("run", "hill.yaml", "--run-dir", "killed"))
    assert raypipe("run", "hill.yaml", "--run-dir", "killed") == 0
    assert sum(ran(hill).values()) == 1 + 24 + 1  # the one that was killed ran again
    for name in ("search", "measures", "variants"):
        whole, again = (table(hill / folder, name) for folder in ("whole", "killed"))
        order = [column for column in ("number", "variant", "method", "key") if column in whole]
        whole, again = (each.sort_values(order, ignore_index=True) for each in (whole, again))
        pd.testing.assert_frame_equal(whole, again)


def test_an_interrupted_search_continues(hill, capsys):
    (hill / "stop.txt").write_text("-90")
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 130
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    assert set(table(hill / "run", "search")["status"]) == {"succeeded"}


def test_a_failed_point_is_a_failed_trial_and_is_tried_again(hill, capsys):
    axes = ("--matrix", "search.axes.fit.layers=[13,3]")
    assert raypipe("run", "hill.yaml", *axes, "--run-dir", "run") == 1
    found = table(hill / "run", "search")
    failed = found[found["status"] == "failed"]
    assert len(found) == 12
    assert 0 < len(failed) < 12
    assert failed["message"].str.contains("bad luck").all()
    assert all(json.loads(point)["fit.layers"] == 13 for point in failed["point"])
    code = (hill / "hill.py").read_text().replace("s.layers == 13", "s.layers == 14")
    (hill / "hill.py").write_text(code)
    sys.modules.pop("hill")
    assert raypipe("run", "hill.yaml", *axes, "--run-dir", "run") == 0
    again = table(hill / "run", "search")
    assert set(again["status"]) == {"succeeded"}
    assert list(again["point"]) == list(found["point"])


def test_whole_ends_of_a_real_range_are_real(hill):
    axis = ("--matrix", "search.axes.fit.rate={low: 1, high: 4}", "--matrix", "search.trials=4")
    assert raypipe("run", "hill.yaml", *axis, "--run-dir", "run") == 0
    points = [json.loads(point) for point in table(hill / "run", "search")["point"]]
    assert not any(point["fit.rate"].is_integer() for point in points)
    assert all(isinstance(point["fit.layers"], int) for point in points)


def test_repetitions_and_fixed_axes_are_averaged(hill):
    more = ("--matrix", "runs=2", "--matrix", "prepare.length=[1,2]")
    more += ("--matrix", "search.trials=3")
    assert raypipe("run", "hill.yaml", *more, "--run-dir", "run") == 0
    assert ran(hill) == {"prepare": 2, "fit": 12, "judge": 12}
    found = table(hill / "run", "search")
    variants = table(hill / "run", "variants").pivot(index="variant", columns="key", values="value")
    judged = table(hill / "run", "measures").query("method == 'judge'")
    judged = judged.merge(variants, left_on="variant", right_index=True)
    means = judged.groupby("fit.rate", sort=False)["value"].mean()
    assert sorted(means) == pytest.approx(sorted(found["measures.value (judge)"]))


def test_two_metrics_and_a_condition(hill):
    text = SEARCH.replace(
        "{method: judge}}",
        "{method: judge}}\n      - {metric: measures.size, where: {method: fit}, mode: max}\n"
        "    sampler: nsgaii\n    constraints: [{metric: measures.size, at_most: 5}]",
    )
    (hill / "hill.yaml").write_text(text)
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    found = table(hill / "run", "search")
    sizes = found["measures.size (fit)"]
    assert list(found["feasible"]) == list(sizes <= 5)
    front = found[found["on_front"]]
    assert len(front)
    assert front["feasible"].all()
    for row in front.to_dict("records"):
        better = found[
            found["feasible"]
            & (sizes >= row["measures.size (fit)"])
            & (found["measures.value (judge)"] < row["measures.value (judge)"])
        ]
        assert better.empty


def test_a_condition_that_no_point_meets_is_said(hill):
    never = ("--matrix", "search.constraints=[{metric: measures.size, at_most: 0}]")
    assert raypipe("run", "hill.yaml", *never, "--run-dir", "run") == 0
    found = table(hill / "run", "search")
    assert not found["feasible"].any()
    assert not found["on_front"].any()
    assert "No point meets the conditions" in (hill / "run/report/index.html").read_text()


def test_a_point_without_a_finite_metric_failed(hill):
    code = (hill / "hill.py").read_text()
    code = code.replace('2 * row["value"]', 'row["value"] if row["size"] < 3 else float("nan")')
    (hill / "hill.py").write_text(code)
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    found = table(hill / "run", "search")
    failed = found[found["status"] == "failed"]
    assert failed["message"].str.contains("has no finite number").all()
    assert all(json.loads(point)["fit.layers"] >= 3 for point in failed["point"])
    assert 0 < len(failed) < 12


def test_impossible_combinations_are_excluded_and_the_search_goes_on(hill):
    code = (hill / "hill.py").read_text()
    check = "def stages(settings):\n    if settings.fit.layers > 3 and settings.fit.rate > 2:\n"
    check += '        raise ValueError("too much of both")\n'
    (hill / "hill.py").write_text(code.replace("def stages(settings):\n", check))
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    found = table(hill / "run", "search")
    excluded = found[found["status"] == "excluded"]
    assert 0 < len(excluded) < 12
    assert excluded["message"].str.contains("too much of both").all()
    assert len(table(hill / "run", "measures")) == 2 * (12 - len(excluded))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("search.axes.fit.rat={low: 1, high: 2}", "did you mean fit.rate"),
        ("search.axes.fit.layers={low: 1.0, high: 2.5}", "input should be a valid integer"),
        ("search.axes.fit.rate={low: 2, high: 1}", "low below high"),
        ("search.axes.tracking=[1]", "the section tracking cannot be varied"),
        ("fit.rate=[1.0]", "search: fit.rate is also an axis of the matrix"),
        ("search.metrics=[{metric: measure.value}]", "no table measure; did you mean measures"),
        (
            "search.metrics=[{metric: measures.valu}]",
            "is not a column of measures; did you mean value",
        ),
        ("search.metrics=[{metric: measures.method}]", "method holds no numbers"),
        ("search.metrics=[{metric: value}]", "must have the form table.column"),
        ("search.metrics=[{metric: measures.size}]", "does not say which size is better"),
        (
            "search.metrics=[{metric: measures.value, where: {methods: fit}}]",
            "where = methods: is not a column of measures; did you mean method",
        ),
        ("search.sampler=tpee", "input should be 'tpe', 'gp'"),
        ("search.constraints=[{metric: measures.size}]", "measures.size: has no bound"),
        ("search.axes.seed={low: 1, high: 5}", "a seed is nothing to choose"),
        ("search.axes.fit.seed={low: 1, high: 5}", "a seed is nothing to choose"),
        ("search.trials=10001", "has 10,001 points; give --yes"),
        ("race={metric: measures.value}", "race: cannot be combined with search"),
    ],
)
def test_an_impossible_search_is_one_message(hill, capsys, text, message):
    for command in ("run", "plan"):
        assert raypipe(command, "hill.yaml", "--matrix", text) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (hill / "runs").exists()


def test_a_metric_that_no_row_has_ends_the_search_with_the_values_there_are(hill, capsys):
    where = "search.metrics=[{metric: measures.value, where: {method: juge}}]"
    assert raypipe("run", "hill.yaml", "--matrix", where, "--run-dir", "run") == 1
    assert "method is one of: fit, judge" in capsys.readouterr().out
    assert ran(hill)["judge"] == 1
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0  # corrected: nothing used it
    assert ran(hill) == {"fit": 11, "judge": 11}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("search.seed=1", "matrix.search.seed: stored 0, now 1"),
        ("search.sampler=random", "matrix.search.sampler: stored 'tpe', now 'random'"),
        ("search.axes.fit.rate.high=9", "matrix.search.axes.fit.rate.high"),
        ("search.metrics=[{metric: measures.value}]", "matrix.search.metrics"),
    ],
)
def test_another_search_in_the_same_run_directory_is_refused(hill, capsys, text, key):
    few = ("--matrix", "search.trials=2")
    assert raypipe("run", "hill.yaml", *few, "--run-dir", "run") == 0
    assert raypipe("run", "hill.yaml", *few, "--matrix", text, "--run-dir", "run") == 2
    assert key in capsys.readouterr().err


def test_the_plan_says_what_a_search_does_at_most(hill, capsys):
    assert raypipe("plan", "hill.yaml", "--matrix", "runs=3") == 0
    output = capsys.readouterr().out
    counts = {line.split()[0]: line.split() for line in output.splitlines()}
    assert counts["prepare"][1] == "1"
    assert "36" in counts["fit"]
    assert "search: at most 12 points by tpe, each at 3 points of the matrix" in output
    assert not (hill / "runs").exists()


def test_only_some_stages_of_a_search(hill):
    fit = ("--matrix", "search.metrics=[{metric: measures.value, where: {method: fit}}]")
    assert raypipe("run", "hill.yaml", *fit, "--run-dir", "run", "--only", "fit") == 0
    assert ran(hill) == {"prepare": 1, "fit": 12}
    assert raypipe("run", "hill.yaml", *fit, "--run-dir", "run") == 0
    assert ran(hill) == {"judge": 12}


def test_a_failure_that_all_points_share_ends_the_search(hill):
    code = (hill / "hill.py").read_text()
    broken = code.replace("def prepare(context):\n", "def prepare(context):\n    1 / 0\n")
    (hill / "hill.py").write_text(broken)
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 1
    assert set(table(hill / "run", "search")["status"]) == {"running"}
    (hill / "hill.py").write_text(code)
    sys.modules.pop("hill")
    assert raypipe("run", "hill.yaml", "--run-dir", "run") == 0
    assert set(table(hill / "run", "search")["status"]) == {"succeeded"}


# the source of proposals alone

LOSS = Metric("measures", "loss", {})
SIZE = Metric("measures", "size", {})


def made(rows: dict | None = None, **given: object) -> Search:
    plain = {
        "axes": {"a": {"low": 0.0, "high": 1.0}, "b": {"low": 1, "high": 64, "log": True}},
        "metrics": [{"metric": "measures.loss"}],
        "trials": 20,
        **given,
    }
    section = SearchSettings.model_validate(plain)
    several = len(section.metrics) > 1
    objectives = [(LOSS, "min"), *([(SIZE, "max")] if several else [])]
    bounds = [] if several else [Bound(SIZE, 40.0, None)]
    return Search(section, objectives, bounds, section.concurrent or 3, rows or {})


def outcome(point: dict) -> Outcome:
    """A result that depends on the point alone; some fail."""
    a, b = point["a"], point["b"]
    if b % 7 == 0:
        return Outcome(failure="no luck")
    loss = (a - 0.3) ** 2 + b / 100
    return Outcome({LOSS.name: Measured(loss, 1), SIZE.name: Measured(float(b), 1)})


def drive(search: Search, *, steps: int = 10**6) -> dict[str, dict]:
    """Let proposals end in the order in which they were asked; return the rows."""
    running = search.ask()
    while running and steps:
        key = running.pop(0)
        (point,) = search.points(key)
        search.tell(key, outcome(point))
        running += search.ask()
        steps -= 1
    assert running or search.is_over
    return json.loads(json.dumps(search.rows()))


KINDS = [
    {"sampler": "tpe"},
    {"sampler": "random"},
    {"sampler": "qmc"},
    {"sampler": "nsgaii"},
    {"sampler": "nsgaii", "metrics": [{"metric": "measures.loss"}, {"metric": "measures.size"}]},
    {"sampler": "nsgaiii", "metrics": [{"metric": "measures.loss"}, {"metric": "measures.size"}]},
    {"sampler": "tpe", "metrics": [{"metric": "measures.loss"}, {"metric": "measures.size"}]},
]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3, deadline=None)
@given(cut=st.integers(0, 25), concurrent=st.integers(1, 5))
def test_a_search_from_stored_rows_equals_an_uninterrupted_one(kind, cut, concurrent):
    whole = drive(made(concurrent=concurrent, **kind))
    half = drive(made(concurrent=concurrent, **kind), steps=cut)
    failed = {key: row for key, row in half.items() if row["status"] == "failed"}
    again = drive(made(half, concurrent=concurrent, **kind))
    assert again == whole
    assert all(again[key]["status"] == "failed" for key in failed)


def test_a_sampler_with_a_surrogate_continues_too():
    whole = drive(made(sampler="gp", trials=14, concurrent=1))
    half = drive(made(sampler="gp", trials=14, concurrent=1), steps=12)
    assert drive(made(half, sampler="gp", trials=14, concurrent=1)) == whole


@pytest.mark.parametrize("sampler", ["nsgaii", "nsgaiii"])
def test_a_population_remembers_its_generations(sampler):
    rows = drive(made(sampler=sampler, trials=100, concurrent=1)).values()
    generations = [next(iter(row["attributes"].values())) for row in rows]
    assert generations == sorted(generations)
    assert generations[-1] == 4

    def mean(generation: int) -> float:
        same = zip(generations, rows, strict=True)
        losses = [row.get(LOSS.name) for number, row in same if number == generation]
        return pd.Series(losses, dtype=float).mean()

    assert mean(4) < mean(0)


def test_a_search_beats_random_points():
    def best(name: str, seed: int) -> float:
        rows = drive(made(sampler=name, trials=40, seed=seed, concurrent=1)).values()
        return min(row[LOSS.name] for row in rows if row["feasible"])

    searched = [best("tpe", seed) for seed in range(3)]
    drawn = [best("random", seed) for seed in range(3)]
    assert sum(searched) < sum(drawn)


def test_points_differ_between_seeds_and_numbers():
    points = [
        json.dumps(row["point"])
        for seed in range(3)
        for row in drive(made(sampler="random", seed=seed)).values()
    ]
    assert len(set(points)) == len(points)
