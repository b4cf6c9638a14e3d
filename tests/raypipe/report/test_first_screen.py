"""The first screen: every sentence from the tables that give rise to it, three per box at most."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raypipe as rp
from raypipe.graph.tables import CORE as COMMON
from raypipe.report.page import asked, came_out, certainty, next_step
from raypipe.report.parts import Code, Section, Tiles
from raypipe.report.results import Declarations, RunResults
from raypipe.store.tables import Column, Table, by_name
from raypipe.study.tables import SEARCH
from raypipe.training.tables import with_metrics
from tests.raypipe.report.page_reader import page_of

COMMAND = "raypipe run x.yaml data.n=2 --run-dir 'my run'"
CONFIGURATION = "train: {training: {steps: 100, seed: 0, monitor: null}}\n"
MEASURES = Table(
    "measures",
    "a method",
    (
        Column("method", "text", "Method."),
        Column("accuracy", "real", "Share of right answers.", better="higher"),
    ),
    axes=("method",),
    baselines=("majority",),
)
METRICS = (
    Column("eval_loss", "real", "Loss.", better="lower"),
    Column("eval_accuracy", "real", "Accuracy.", better="higher"),
    Column("eval_regret", "real", "Regret.", "m", "lower", baseline="eval_random_regret"),
)
CORE = by_name(with_metrics((*COMMON, SEARCH), METRICS))
ONCE = "One run, no interval over seeds."
MEANS = "Means of {} repetitions; ± is Student's 95 % confidence interval."
NOTHING = ["The tables suggest no next step."]
SIX = ["Repeat with 6 seeds to find out what is chance, with:", "--matrix runs=6"]
ACCURACY = "accuracy (higher is better)"
HELD_OUT = "held-out {} ({} is better)"


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


def _measures(**accuracy: float) -> pd.DataFrame:
    return pd.DataFrame({"method": list(accuracy), "accuracy": list(accuracy.values())})


def _steps(metric: str, *values: float, **columns: Any) -> pd.DataFrame:
    steps = 10 * np.arange(1, len(values) + 1)
    return pd.DataFrame({"trial_id": "train", "step": steps, "loss": 1.0, "samples_per_s": 9.0,
                         metric: values, **columns})  # fmt: skip


def _trials(**columns: object) -> pd.DataFrame:
    row = {"trial_id": ["train"], "stage": "train", "status": "succeeded", **columns}
    return pd.DataFrame(row)


def _matrix(seeds: int, *score: float) -> dict[str, pd.DataFrame]:
    """The tables of a matrix over two learning rates; scores by rate, then by seed."""
    variants, rows, scores = [], [], iter(score)
    for rate in (0.1, 0.2):
        for seed in range(seeds):
            name = f"rate={rate},seed={seed}"
            for key, value in (("train.rate", rate), ("seed", seed)):
                variants.append({"variant": name, "key": key, "value": str(value)})
            rows += [
                {"variant": name, "method": "ours", "accuracy": next(scores)},
                {"variant": name, "method": "majority", "accuracy": 0.1},
            ]
    return {"variants": pd.DataFrame(variants), "measures": pd.DataFrame(rows)}


def _trainings(*accuracy: float) -> dict[str, pd.DataFrame]:
    """The tables of a matrix over the rate and two values of a training's own seed."""
    values, variants, rows = iter(accuracy), [], []
    for rate, seed in ((0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)):
        name = f"{rate}/{seed}"
        for key, value in (("train.rate", rate), ("train.seed", seed)):
            variants.append({"variant": name, "key": key, "value": str(value)})
        rows.append({"variant": name, "trial_id": name, "stage": "train", "loss_final": 0.1,
                     "status": "succeeded", "eval_accuracy": next(values)})  # fmt: skip
    return {"variants": pd.DataFrame(variants), "trials": pd.DataFrame(rows)}


def _studies(ours: list[float], theirs: list[float], random: list[float]) -> RunResults:
    columns = (Column("optimizer", "text", "Name."), Column("cost", "real", "", better="lower"))
    table = Table("studies", "a study", columns, axes=("optimizer",), baselines=("random",),
                  repeats="studies.runs")  # fmt: skip
    rows = [
        {"optimizer": name, "run": run, "cost": cost}
        for name, costs in {"ours": ours, "theirs": theirs, "random": random}.items()
        for run, cost in enumerate(costs)
    ]
    return _run(declared=(table,), studies=pd.DataFrame(rows))


def _function(
    scores: Mapping[tuple[int, int, int], float | None],
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
    calls = pd.DataFrame(list(scores), columns=["C", "gamma", "seed"]).assign(
        score=list(scores.values()), duration_s=1.0, attempt=1, **columns
    )
    calls = calls.assign(call=calls.index.astype(str)).dropna(subset="score")
    tables = {"stages": _stages(status), "calls": calls}
    return RunResults(tables, "f", command, "function: m:f\narguments: {seed: 0}\n", declared)


NODES = pd.DataFrame(
    {"command_id": ["a", "b", "b"], "started_at": ["2026-01-01", "2026-01-02", "2026-01-02"],
     "hostname": ["old", "n1", "n2"], "cpus": 8, "memory_bytes": 32 * 2**30, "gpus": "H100",
     "command": ["raypipe run a", *["raypipe run b"] * 2]}
)  # fmt: skip
FAILURES = pd.DataFrame({"stage": ["stage1", "stage0"], "unit": ["a unit", "b"], "attempt": 1,
                         "kind": "error", "message": "no"})  # fmt: skip
OWN = Section("Own", [], certainty=("Certain.",), advice=("Do it.",))
BEST_AT_20 = _steps("eval_loss", 5.0, 3.0, 3.57, 3.81)
FUNCTION = {(1, 1, 0): 0.1, (2, 1, 0): 0.2}

#: what a run's boxes say, of those that are given
CASES: dict[str, tuple[RunResults, dict[str, Any]]] = {
    "asked": (
        _run(**_matrix(3, *[0.5] * 6), environment=NODES,
             stages=_stages("succeeded", "succeeded", "skipped")),
        {"asked": ["Classify things.", "Varied: train.rate (2 values), 3 seeds.",
                   "2 of 3 stages succeeded on 2 nodes (H100, 16 CPUs, 64.0 GiB of memory)."]},
    ),
    "above the baseline": (
        _run(measures=_measures(ours=0.9, majority=0.5)),
        {"asked": ["Classify things.", "Compared: method (2 values).", "1 of 1 stage succeeded."],
         "tiles": [(ACCURACY, "0.9", "ours; 0.4 above majority (0.5)", "good")],
         "certain": [ONCE], "next": SIX, "beaten": []},
    ),
    "below the baseline": (
        _run(measures=_measures(ours=0.4, majority=0.5)),
        {"tiles": [(ACCURACY, "0.4", "ours; 0.1 below majority (0.5)", "warn")],
         "beaten": ["ours is not better than the baseline majority in accuracy."]},
    ),
    "no seed": (_run("n: 3\n", measures=_measures(ours=0.9, majority=0.5)), {"next": NOTHING}),
    "equals are not repeated": (
        _run(measures=_measures(ours=0.9, theirs=0.9, majority=0.5)),
        {"certain": ["One run of each, no interval over seeds."], "next": NOTHING},
    ),
    "not declared": (
        _run(squares=pd.DataFrame({"run_id": "r", "name": ["a", "b"], "value": [1.0, 3.0]})),
        {"tiles": [("value", "1 to 3", "mean 2 of 2 rows", "")]},
    ),
    "last model": (
        _run(steps=BEST_AT_20, trials=_trials(eval_loss=3.81)),
        {"tiles": [(HELD_OUT.format("loss", "lower"), "3.81", "train, at the end; 3 at step 20",
                    "")]},
    ),
    "best model": (
        _run(steps=BEST_AT_20, trials=_trials(best_step=[20])),
        {"tiles": [(HELD_OUT.format("loss", "lower"), "3",
                    "train, best of 4 evaluations, at step 20; 3.81 at the end", "")], "next": SIX},
    ),
    "training loss": (
        _run(trials=_trials(loss_final=[1.5])),
        {"tiles": [("training loss (lower is better)", "1.5", "", "")], "certain": [ONCE]},
    ),
    "baseline of a held-out metric": (
        _run(steps=_steps("eval_regret", 0.5, 0.4, eval_random_regret=0.3)),
        {"tiles": [("held-out regret (m, lower is better)", "0.4",
                    "train, at the end; random regret 0.3", "warn")],
         "beaten": ["train is not better than the baseline random regret in held-out regret."]},
    ),
    "decided": (
        _run(**_matrix(3, 0.80, 0.81, 0.82, 0.60, 0.61, 0.62)),
        {"certain": [MEANS.format(3),
                     "Accuracy is 0.710 ± 0.025 above the baseline majority: more than chance.",
                     "Accuracy is 0.2 ± 0 above the second best, ours, rate=0.2: more than "
                     "chance."], "next": NOTHING},
    ),
    "undecided": (
        _run(**_matrix(2, 0.05, 0.4, 0.1, 0.3)),
        {"certain": [MEANS.format(2),
                     "Accuracy is 0.1 ± 2.2 above the baseline majority: it may be chance.",
                     "Accuracy is 0.03 ± 0.95 above the second best, ours, rate=0.2: it may be "
                     "chance."],
         "next": ["2 repetitions cannot tell ours, rate=0.1 from majority by accuracy: take 6, "
                  "with:", "--matrix runs=6"]},
    ),
    "that of the baseline": (_run(**_matrix(3, *[0.1] * 6)), {"next": NOTHING}),
    "what a seed shares is no difference": (
        _studies([1.0, 5.0, 9.0], [1.5, 5.6, 9.4], [2.0, 6.1, 10.0]),
        {"certain": [MEANS.format(3),
                     "Cost is 1.03 ± 0.14 below the baseline random: more than chance.",
                     "Cost is 0.50 ± 0.25 below the second best, theirs: more than chance."]},
    ),
    "several that only reach the baseline": (
        _studies([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        {"beaten": ["ours and theirs are not better than the baseline random in cost."],
         "next": NOTHING},
    ),
    "a wide baseline": (
        _studies([452.0, 455.0, 447.0], [452.0, 455.0, 447.0], [604.0, 447.0, 467.0]),
        {"certain": [MEANS.format(3),
                     "Cost is 55 ± 212 below the baseline random: it may be chance."],
         "next": ["3 repetitions cannot tell ours and theirs from random by cost: take 6, with:",
                  "studies.runs=6"]},
    ),
    "the experiment's own words": (
        replace(_run(measures=_measures(ours=0.9, majority=0.5)), sections=(OWN,)),
        {"certain": ["Certain."], "next": ["Do it."]},
    ),
    "not in a matrix, of which they show a point": (
        replace(_run(**_matrix(3, *[0.1] * 6)), sections=(OWN,)), {"next": NOTHING},
    ),
    "failed": (
        _run(stages=_stages("succeeded", "failed"), failures=FAILURES, steps=BEST_AT_20),
        {"next": ["1 stage failed. Read the error, then continue:",
                  f"raypipe logs RUN_DIR 'a unit'\n{COMMAND}"]},
    ),
    "stopped": (_run(stages=_stages("succeeded", "interrupted"), steps=BEST_AT_20),
                {"next": ["1 stage not done. Continue:", COMMAND]}),
    "trainings of a matrix": (
        _run(**_trainings(0.9, 0.5, 0.79, 0.81)),
        {"asked": ["Classify things.", "Varied: train.rate (2 values), 2 seeds.",
                   "1 of 1 stage succeeded."],
         "tiles": [(HELD_OUT.format("accuracy", "higher"), "0.80 ± 0.13",
                    "rate=0.2, perhaps by chance before rate=0.1 (0.7); highest of 2", "")],
         "next": ["2 repetitions cannot tell rate=0.2 from rate=0.1 by held-out accuracy: take 6, "
                  "with:", "--matrix train.seed=0..5"]},
    ),
    **{
        f"seeds of a function: {more}": (
            _function(dict(zip([(C, 1, seed) for C in (1, 2) for seed in seeds], scores,
                               strict=True)), "higher"),
            {"last": f"seed={more}"},
        )
        for seeds, scores, more in (
            ([0], [0.1, 0.2], "0..5"),
            ([3, 4], [0.1, 0.9, 0.5, 0.6], "3..8"),
        )
    },
    **{
        f"no direction: {command}": (
            _function(FUNCTION, command=command, loss=3.0),
            {"asked": ["Compared: C (2 values).", "2 of 2 calls succeeded."],
             "tiles": [("score", "0.1 to 0.2", "mean 0.15 of 2 rows", ""), ("loss", "3", "", "")],
             "last": code},
        )
        for command, code in (
            ("raypipe map m:f --run-dir r", "--minimize loss"),
            ("raypipe run f.yaml --run-dir r", "'minimize=[loss]'"),
            ("rp.map(f, ..., run_dir='r')", "minimize='loss'"),
        )
    },
    "a failed call": (
        _function({**FUNCTION, (3, 1, 0): None}, status="failed"),
        {"asked": ["Compared: C (2 values).", "2 of 3 calls succeeded."],
         "next": ["1 call failed. Read the error, then continue:", "raypipe map m:f --run-dir r"]},
    ),
    "a call not done": (
        _function({**FUNCTION, (3, 1, 0): None}, status="interrupted"),
        {"next": ["1 call not done. Continue:", "raypipe map m:f --run-dir r"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_boxes_say(name: str) -> None:
    run, expected = CASES[name]
    advice = [part.text if isinstance(part, Code) else str(part) for part in next_step(run)]
    tiles = [tile for part in came_out(run) if isinstance(part, Tiles) for tile in part.tiles]
    found = {
        "asked": list(asked(run)),
        "tiles": [(tile.label, tile.value, tile.note, tile.tone) for tile in tiles],
        "certain": list(certainty(run)),
        "next": advice,
        "last": advice[-1],
        "beaten": run.beaten,
    }
    assert {key: found[key] for key in expected} == expected


def test_a_run_without_results_says_so() -> None:
    assert came_out(_run()) == ["No table has a number."]


@pytest.mark.parametrize(
    ("last", "values", "runs"), [(None, {"C": 0, "gamma": 1}, 3), (3.0, {"C": 1, "gamma": 1}, 1)]
)
def test_a_setting_whose_difficult_seeds_failed_is_not_the_best(last, values, runs) -> None:
    scores = {
        (C, gamma, seed): score + 0.1 * seed + 2.0 * (seed == 0)  # the first one is easy
        for C, row in enumerate([[0.5, 0.6], [0.4, 0.3]])
        for gamma, score in enumerate(row)
        for seed in range(3)
    }
    scores |= {(1, 1, 1): None, (1, 1, 2): None}
    (best,) = _function(scores | ({(1, 1, 0): last} if last else {}), "higher").headlines
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


NOT_FINITE = (
    "calls.y is not finite in 2 of 3 rows: NaN at x=0; inf at x=1; calls.z is not finite in any of "
    "3 rows: NaN at x=0, x=1 and x=2."
)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "said"),
    [
        (lambda x: {"y": 1.0}, {"x": range(9)}, {"maximize": "y"},
         {"What to do next": NOTHING}),
        (lambda x: {"y": [math.nan, math.inf, 1.0][x], "z": math.nan}, {"x": range(3)},
         {"maximize": ["y", "z"]}, {"What came out": [NOT_FINITE]}),
        (lambda x, seed: {"y": x + seed % 3, "z": -x}, {"x": range(3), "seed": range(4)},
         {"maximize": ["y", "z"]}, {}),
        (lambda x, k: {"y": x * k}, {"x": 1, "k": [1, 2]},
         {"minimize": "y", "overrides": {"matrix.axes": {"arguments.x": [1, 2, 3]}}}, {}),
    ],
    ids=("tie", "not finite", "seeds", "matrix"),
)  # fmt: skip
def test_the_first_screen_of_functions(
    tmp_path: Path, function: Callable[..., Any], arguments: Any, options: Any, said: Any
) -> None:
    rp.map(function, arguments, run_dir=tmp_path / "r", local=True, **options)
    found = boxes((tmp_path / "r/report/index.html").read_text())
    assert {name: found[name] for name in said} == said


NUMBERS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-9, 9), st.sampled_from(
    [math.nan, math.inf, None]))  # fmt: skip
ROW = st.fixed_dictionaries(
    {"method": st.sampled_from(["m0", "m1", "m2", "m3"]), "corpus": st.sampled_from("ab"),
     "seed": st.integers(0, 3), "score": NUMBERS, "cost": NUMBERS}
)  # fmt: skip
SCORES = Table(
    "scores",
    "a score",
    (
        Column("score", "real", "It.", better="higher"),
        Column("cost", "real", "It.", better="lower"),
    ),
    axes=("method",),
    groups=("corpus",),
    baselines=("m0",),
    repeats="seeds",
)


@settings(max_examples=15, deadline=None)
@given(st.booleans(), st.lists(ROW, max_size=25))
def test_the_first_screen_of_any_table(says_too_much: bool, rows: list[dict[str, Any]]) -> None:
    found, certain, do = ([f"{name} {n}." for n in range(5)] for name in ("Found", "Sure", "Do"))
    own = Section("Own", [], findings=found, certainty=certain, advice=[*do, Code("go")])
    names = ["method", "corpus", "seed", "score", "cost"]
    run = _run(declared=(SCORES,), scores=pd.DataFrame(rows, columns=names))
    run = replace(run, sections=(own,) if says_too_much else ())
    boxes(page_of(run).source)
