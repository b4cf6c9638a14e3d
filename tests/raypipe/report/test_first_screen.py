"""The first screen: every sentence from the tables that give rise to it, three per box at most."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raypipe as rp
from raypipe.graph.tables import CORE as COMMON
from raypipe.report.page import asked, came_out, certainty, next_step
from raypipe.report.parts import Code, Section
from raypipe.report.results import Declarations, RunResults
from raypipe.store.tables import Column, Table, by_name
from raypipe.study.tables import SEARCH
from raypipe.training.tables import with_metrics
from tests.raypipe.report.page_reader import page_of
from tests.scenario import cases

COMMAND = "raypipe run x.yaml data.n=2 --run-dir 'my run'"
CONFIGURATION = "train: {training: {steps: 100, seed: 0, monitor: null}}\n"
ACCURACY = Column("accuracy", "real", "Share of right answers.", better="higher")
COST = Column("cost", "real", "It.", better="lower")
MEASURES = Table("measures", "a method", (ACCURACY,), axes=("method",), baselines=("majority",))
STUDIES = Table(
    "studies", "a study", (COST,), axes=("optimizer",), baselines=("random",),
    repeats="studies.runs",
)  # fmt: skip
SCORES = replace(MEASURES, name="scores", columns=(ACCURACY, COST), groups=("corpus",),
                 baselines=("m0",), repeats="seeds")  # fmt: skip
METRICS = (
    Column("eval_loss", "real", "Loss.", better="lower"),
    Column("eval_accuracy", "real", "Accuracy.", better="higher"),
    Column("eval_regret", "real", "Regret.", "m", "lower"),
)
CORE = by_name(with_metrics((*COMMON, SEARCH), METRICS))


def _stages(*statuses: str) -> pd.DataFrame:
    names = [f"stage{place}" for place in range(len(statuses))]
    return pd.DataFrame({"run_id": "r", "stage": names, "status": statuses, "duration_s": 1.0,
                         "started_at": pd.Timestamp("2026-03-02", tz="UTC"), "device": "cpu",
                         "gpu_peak_bytes": None})  # fmt: skip


def _run(
    configuration: str = CONFIGURATION, declared: Sequence[Table] = (MEASURES,), **tables: Any
) -> RunResults:
    own = Declarations("Classify things", declared, CORE)
    every = {"stages": _stages("succeeded"), **tables}
    return RunResults(every, "toy", COMMAND, configuration, own)


def _varied(key: str, points: Mapping[tuple[Any, Any], str]) -> pd.DataFrame:
    """The variants of a learning rate and of a seed, by name."""
    return pd.DataFrame(
        [{"variant": name, "key": axis, "value": str(value)}
         for point, name in points.items()
         for axis, value in zip(("train.rate", key), point, strict=True)]
    )  # fmt: skip


def _matrix(seeds: int, *score: float) -> dict[str, pd.DataFrame]:
    """The tables of a matrix over two learning rates; scores by rate, then by seed."""
    points = {p: f"rate={p[0]},seed={p[1]}" for p in product((0.1, 0.2), range(seeds))}
    rows = [
        {"variant": name, "method": method, "accuracy": accuracy}
        for name, own in zip(points.values(), score, strict=True)
        for method, accuracy in (("ours", own), ("majority", 0.1))
    ]
    return {"variants": _varied("seed", points), "measures": pd.DataFrame(rows)}


def _trainings(*accuracy: float) -> dict[str, pd.DataFrame]:
    """The tables of a matrix over the rate and two values of a training's own seed."""
    points = {p: f"{p[0]}/{p[1]}" for p in product((0.1, 0.2), (0, 1))}
    rows = [{"variant": name, "trial_id": name, "stage": "train", "loss_final": 0.1,
             "status": "succeeded", "eval_accuracy": own}
            for name, own in zip(points.values(), accuracy, strict=True)]  # fmt: skip
    return {"variants": _varied("train.seed", points), "trials": pd.DataFrame(rows)}


def _function(
    scores: Sequence[Sequence[Any]],
    better: str = "",
    command: str = "raypipe map m:f --run-dir r",
    status: str = "succeeded",
    **columns: Any,
) -> RunResults:
    """A run of a function of ``C``, ``gamma`` and ``seed`` that returns ``score``."""
    own = (
        Column("call", "text", "Arguments."),
        *([Column("score", "real", "It.", better=better)] if better else []),  # type: ignore[arg-type]
        Column("duration_s", "real", "Time.", "s"),
        Column("attempt", "integer", "Number."),
    )
    table = Table("calls", "a call", own, open=True, axes=("C", "gamma"))
    declared = Declarations("", (table,), CORE,
                            lambda: [f"calls/{place}" for place in range(len(scores))])  # fmt: skip
    calls = pd.DataFrame(scores, columns=["C", "gamma", "seed", "score"])
    calls = calls.assign(call=calls.index.astype(str), duration_s=1.0, attempt=1, **columns)
    tables = {"stages": _stages(status), "calls": calls.dropna(subset="score")}
    return RunResults(tables, "f", command, "function: m:f\narguments: {seed: 0}\n", declared)


OWN = Section("Own", [], certainty=("Certain.",), advice=("Do it.",))


def run_of(case: Mapping[str, Any]) -> RunResults:
    """The run of a case: what it has of these tables, and the experiment's own section."""
    if "function" in case:
        return _function(**case["function"])
    tables = {name: pd.DataFrame(columns) for name, columns in case.get("tables", {}).items()}
    if "stages" in case:
        tables["stages"] = _stages(*case["stages"])
    if "matrix" in case:
        tables |= _matrix(*case["matrix"])
    if "trainings" in case:
        tables |= _trainings(*case["trainings"])
    declared = (STUDIES,) if "studies" in tables else (MEASURES,)
    run = _run(case.get("configuration", CONFIGURATION), declared, **tables)
    return replace(run, sections=(OWN,) if case.get("own") else ())


@pytest.mark.parametrize(
    "case", cases(__file__, "first_screen"), ids=lambda case: str(case["name"])
)
def test_the_boxes_say(case: Mapping[str, Any]) -> None:
    run = run_of(case)
    advice = [part.text if isinstance(part, Code) else str(part) for part in next_step(run)]
    tiles = [tile for part in came_out(run) if isinstance(part, tuple) for tile in part]
    found = {
        "asked": list(asked(run)),
        "tiles": [[tile.label, tile.value, tile.note, tile.tone] for tile in tiles],
        "certain": list(certainty(run)),
        "next": advice,
        "last": advice[-1],
        "beaten": run.beaten,
    }
    assert {key: found[key] for key in case["says"]} == case["says"]


def test_a_run_without_results_says_so() -> None:
    assert came_out(_run()) == ["No table has a number."]


@pytest.mark.parametrize(
    ("last", "values", "runs"), [(None, {"C": 0, "gamma": 1}, 3), (3.0, {"C": 1, "gamma": 1}, 1)]
)
def test_a_setting_whose_difficult_seeds_failed_is_not_the_best(last, values, runs) -> None:
    scores: dict[tuple[int, ...], float | None] = {
        (C, gamma, seed): score + 0.1 * seed + 2.0 * (seed == 0)  # the first one is easy
        for C, row in enumerate([[0.5, 0.6], [0.4, 0.3]])
        for gamma, score in enumerate(row)
        for seed in range(3)
    }
    scores |= {(1, 1, 1): None, (1, 1, 2): None} | ({(1, 1, 0): last} if last else {})
    (best,) = _function([[*key, score] for key, score in scores.items()], "higher").headlines
    assert (best.ranking[0].values, best.runs) == (values, runs)


def boxes(page: str) -> dict[str, list[str]]:
    """Return the paragraphs of each box: three sentences at most, none twice on the page."""
    main = re.sub(r"<svg.*?</svg>", "", page[page.index("<main>") :], flags=re.DOTALL)
    texts = _paragraphs(main)
    assert [text for text, count in Counter(texts).items() if count > 1] == []
    answers = re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", main, re.DOTALL)
    found = {question: _paragraphs(answer) for question, answer in answers}
    for question, paragraphs in found.items():
        ends = re.findall(r"[.!?](?=\s+[A-Z]|$)|:$", "\n".join(paragraphs), re.MULTILINE)
        assert len(ends) <= 3, (question, paragraphs)
    return found


def _paragraphs(text: str) -> list[str]:
    found = re.findall(r"<p>(.*?)</p>", text, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", "", each)).strip() for each in found]


NOT_FINITE = ["calls.y is not finite in 2 of 3 rows.", "calls.z is not finite in any of 3 rows."]


@pytest.mark.usefixtures("report")
def test_the_first_screen_of_a_function_says_what_is_not_finite(tmp_path: Path) -> None:
    def function(x: int) -> dict[str, float]:
        return {"y": [math.nan, math.inf, 1.0][x], "z": math.nan}

    best = ["y", "z"]
    rp.map(function, {"x": range(3)}, run_dir=tmp_path / "r", local=True, maximize=best)
    assert boxes((tmp_path / "r/report/index.html").read_text())["What came out"] == NOT_FINITE


NUMBERS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-9, 9), st.sampled_from(
    [math.nan, math.inf, None]))  # fmt: skip
ROW = st.fixed_dictionaries(
    {"method": st.sampled_from(["m0", "m1", "m2", "m3"]), "corpus": st.sampled_from("ab"),
     "seed": st.integers(0, 3), "accuracy": NUMBERS, "cost": NUMBERS}
)  # fmt: skip


@settings(max_examples=5)
@given(st.booleans(), st.lists(ROW, max_size=25))
def test_the_first_screen_of_any_table(says_too_much: bool, rows: list[dict[str, Any]]) -> None:
    found, certain, do = ([f"{name} {n}." for n in range(5)] for name in ("Found", "Sure", "Do"))
    own = Section("Own", [], findings=found, certainty=certain, advice=[*do, Code("go")])
    names = ["method", "corpus", "seed", "accuracy", "cost"]
    run = _run(declared=(SCORES,), scores=pd.DataFrame(rows, columns=names))
    run = replace(run, sections=(own,) if says_too_much else ())
    boxes(page_of(run).source)
