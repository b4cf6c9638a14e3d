"""Every sentence of the first screen, from the tables that give rise to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from raypipe.report.headlines import Declarations, RunResults
from raypipe.report.sections import Code, Section, Tile, Tiles
from raypipe.report.summary import asked, came_out, certainty, next_step, training_tiles
from raypipe.store.tables import Column, Table
from tests.raypipe.report.page_reader import Page, report_files

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
)
CORE = frozenset({"stages", "trials", "steps", "variants", "failures", "environment", "search"})
ONCE = "One run, no interval over seeds."
NOTHING = ["The tables suggest no next step."]


def _stages(*statuses: str) -> pd.DataFrame:
    names = [f"stage{place}" for place in range(len(statuses))]
    return pd.DataFrame({"run_id": "r", "stage": names, "status": statuses, "duration_s": 1.0,
                         "started_at": pd.Timestamp("2026-03-02", tz="UTC"), "device": "cpu",
                         "gpu_peak_bytes": None})  # fmt: skip


def _about(
    configuration: str = CONFIGURATION, command: str = COMMAND, **tables: pd.DataFrame
) -> RunResults:
    declared = Declarations("Classify things", (MEASURES,), METRICS, CORE)
    every = {"stages": _stages("succeeded"), **tables}
    return RunResults(every, "toy", command, configuration, declared)


def _measures(**accuracy: float) -> pd.DataFrame:
    return pd.DataFrame({"method": list(accuracy), "accuracy": list(accuracy.values())})


def _steps(values: list[float], metric: str = "eval_loss") -> pd.DataFrame:
    steps = 10 * np.arange(1, len(values) + 1)
    return pd.DataFrame({"trial_id": "train", "step": steps, "loss": 1.0, "samples_per_s": 9.0,
                         metric: values})  # fmt: skip


def _matrix(rates: list[float], seeds: int, score: list[float]) -> dict[str, pd.DataFrame]:
    """The tables of a matrix over the learning rate; scores by rate, then by seed."""
    variants, rows = [], []
    scores = iter(score)
    for rate in rates:
        for seed in range(seeds):
            name = f"rate={rate},seed={seed}"
            for key, value in (("train.rate", rate), ("seed", seed)):
                variants.append({"variant": name, "key": key, "value": str(value)})
            rows += [
                {"variant": name, "method": "ours", "accuracy": next(scores)},
                {"variant": name, "method": "majority", "accuracy": 0.1},
            ]
    return {"variants": pd.DataFrame(variants), "measures": pd.DataFrame(rows)}


def _next(about: RunResults) -> list[str]:
    return [part.text if isinstance(part, Code) else str(part) for part in next_step(about)]


def _tiles(about: RunResults) -> list[Tile]:
    return [tile for part in came_out(about) if isinstance(part, Tiles) for tile in part.tiles]


def _words(about: RunResults) -> str:
    files = report_files(
        about.tables, about.sections, "toy", {}, about.command, about.configuration, about.declared
    )
    return Page(files["index.html"].decode()).words


def test_what_was_asked() -> None:
    environment = pd.DataFrame(
        {"command_id": ["a", "b", "b"], "started_at": ["2026-01-01", "2026-01-02", "2026-01-02"],
         "hostname": ["old", "n1", "n2"], "cpus": 8, "memory_bytes": 32 * 2**30, "gpus": "H100",
         "command": ["raypipe run a", *["raypipe run b"] * 2]}
    )  # fmt: skip
    stages = _stages("succeeded", "succeeded", "skipped")
    about = _about(**_matrix([0.1, 0.2], 3, [0.5] * 6), stages=stages, environment=environment)
    assert list(asked(about)) == [
        "Classify things.",
        "Varied: train.rate (2 values), 3 seeds.",
        "2 of 3 stages succeeded on 2 nodes (H100, 16 CPUs, 64.0 GiB of memory).",
    ]
    assert about.asked_command == "raypipe run b"
    plain = _about(measures=_measures(ours=0.9, majority=0.5))
    assert list(asked(plain)) == ["Classify things.", "1 of 1 stage succeeded."]
    several = _about(measures=_measures(ours=0.9, theirs=0.8, majority=0.5))
    assert "Compared: method (2 values, 1 baseline)." in list(asked(several))


@pytest.mark.parametrize(
    ("ours", "note", "tone", "beaten"),
    [
        (0.9, "ours; 0.4 above majority (0.5)", "good", []),
        (0.4, "ours; 0.1 below majority (0.5)", "warn",
         ["ours is not better than the baseline majority in accuracy."]),
    ],
)  # fmt: skip
def test_what_came_out_is_the_best_against_the_baseline(ours, note, tone, beaten) -> None:
    about = _about(measures=_measures(ours=ours, majority=0.5))
    (tile,) = _tiles(about)
    assert (tile.label, tile.value, tile.note, tile.tone) == (
        "accuracy (higher is better)", str(ours), note, tone,
    )  # fmt: skip
    assert about.beaten == beaten
    words = _words(about)
    assert words.count(note) == 1  # not repeated in its table


def test_a_table_that_was_not_declared_shows_its_numbers() -> None:
    own = pd.DataFrame({"run_id": "r", "name": ["a", "b"], "value": [1.0, 3.0]})
    assert [(tile.label, tile.value) for tile in _tiles(_about(squares=own))] == [
        ("value", "1 to 3")
    ]
    assert came_out(_about()) == ["No table has a number."]


def _trials(**columns: object) -> pd.DataFrame:
    row = {"trial_id": ["train"], "stage": "train", "status": "succeeded", **columns}
    return pd.DataFrame(row)


@pytest.mark.parametrize(
    ("steps", "trials", "value", "note", "tone"),
    [
        (_steps([5.0, 3.0, 3.57, 3.81]), None, "3.81", "train, at the end; 3 at step 20", "warn"),
        (_steps([5.0, 3.0, 3.57, 3.81]), _trials(best_step=[20], stopped_early=False), "3",
         "train, best of 4 evaluations, at step 20; 3.81 at the end", ""),
        (_steps([5.0, 3.0, 3.57, 3.81]), _trials(best_step=[20], stopped_early=True), "3",
         "train, best of 4 evaluations, at step 20; 3.81 at the end, where it stopped early (40)",
         ""),
        (_steps([0.3, 0.5, 0.8], "eval_accuracy"), None, "0.8", "train, at the end", ""),
    ],
)  # fmt: skip
def test_a_training_shows_the_held_out_value_of_its_model(steps, trials, value, note, tone):
    """That of the last step, unless held-out data chose the best one."""
    tables = {"steps": steps} if trials is None else {"steps": steps, "trials": trials}
    (tile,) = training_tiles(_about(**tables))
    assert (tile.value, tile.note, tile.tone) == (value, note, tone)


def test_a_training_without_evaluations_shows_its_loss_and_a_metric_of_a_table_is_shown_once():
    (tile,) = training_tiles(_about(trials=_trials(loss_final=[1.5])))
    assert (tile.label, tile.value) == ("training loss", "1.5")
    steps = _steps([0.5, 0.9], "eval_accuracy")
    about = _about(measures=_measures(ours=0.9, majority=0.5), steps=steps)
    assert list(training_tiles(about)) == []


def test_a_held_out_metric_has_the_baseline_that_it_declares() -> None:
    metric = Column("eval_regret", "real", "Regret.", "m", "lower", baseline="eval_random_regret")
    declared = Declarations("", (), (metric,), CORE)
    steps = _steps([0.5, 0.4], "eval_regret").assign(eval_random_regret=[0.3, 0.3])
    about = replace(_about(steps=steps), declared=declared)
    tile = next(iter(training_tiles(about)))
    assert (tile.label, tile.note, tile.tone) == (
        "held-out regret (m, lower is better)", "train, at the end; random regret 0.3", "warn",
    )  # fmt: skip
    assert about.beaten == [
        "train is not better than its baseline: held-out regret 0.4, random regret 0.3."
    ]


SIX = ["Repeat with 6 seeds to find out what is chance, with:", "--matrix runs=6"]
TAKE = "2 repetitions cannot tell ours, rate=0.1 from majority by accuracy: take 6, with:"


@pytest.mark.parametrize(
    ("tables", "certain", "advice"),
    [
        ({"measures": _measures(ours=0.9, majority=0.5)}, [ONCE], SIX),
        # values that are equal are not repeated
        ({"measures": _measures(ours=0.9, theirs=0.9, majority=0.5)},
         ["One run of each, no interval over seeds."], NOTHING),
        (_matrix([0.1, 0.2], 3, [0.80, 0.81, 0.82, 0.60, 0.61, 0.62]),
         ["Means of 3 repetitions; ± is Student's 95 % confidence interval.",
          "Accuracy is 0.710 ± 0.025 above the baseline majority: more than chance.",
          "Accuracy is 0.2 (in every repetition) above the second best, ours, rate=0.2 (0.61): "
          "more than chance."], NOTHING),
        (_matrix([0.1, 0.2], 2, [0.05, 0.4, 0.1, 0.3]),
         ["Means of 2 repetitions; ± is Student's 95 % confidence interval.",
          "Accuracy is 0.1 ± 2.2 above the baseline majority: it may be chance.",
          "Accuracy is 0.03 ± 0.95 above the second best, ours, rate=0.2 (0.2): it may be chance."],
         [TAKE, "--matrix runs=6"]),
        (_matrix([0.1, 0.2], 3, [0.1] * 6),  # that of the baseline, too
         ["Means of 3 repetitions; ± is Student's 95 % confidence interval.",
          "Accuracy is that of the baseline majority in every repetition."], NOTHING),
    ],
    ids=("once", "equal", "decided", "undecided", "all equal"),
)  # fmt: skip
def test_certainty_and_the_seeds_that_are_needed(tables, certain, advice) -> None:
    about = _about(**tables)
    assert list(certainty(about)) == certain
    assert _next(about) == advice
    if advice == SIX:
        assert _next(replace(about, configuration="n: 3\n")) == NOTHING  # it has no seed


def _studies(ours: list[float], theirs: list[float], random: list[float]) -> RunResults:
    columns = (Column("optimizer", "text", "Name."), Column("cost", "real", "", better="lower"))
    table = Table("studies", "a study", columns, axes=("optimizer",), baselines=("random",),
                  repeats="studies.runs")  # fmt: skip
    rows = [
        {"optimizer": name, "run": run, "cost": cost}
        for name, costs in {"ours": ours, "theirs": theirs, "random": random}.items()
        for run, cost in enumerate(costs)
    ]
    about = _about(studies=pd.DataFrame(rows))
    return replace(about, declared=Declarations("", (table,), (), CORE))


def test_what_a_seed_shares_is_no_difference() -> None:
    about = _studies([1.0, 5.0, 9.0], [1.5, 5.6, 9.4], [2.0, 6.1, 10.0])
    (best,) = about.headlines
    assert best.half > 9  # the seeds differ more than the optimizers
    assert best.baseline is not None
    assert best.baseline.gain == pytest.approx(1.0333, abs=1e-4)
    assert list(certainty(about))[1:] == [
        "Cost is 1.03 ± 0.14 below the baseline random: more than chance.",
        "Cost is 0.50 ± 0.25 below the second best, theirs (5.5): more than chance.",
    ]


def test_several_that_only_reach_the_baseline_are_told_in_plural() -> None:
    about = _studies([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert about.beaten == ["ours and theirs are not better than the baseline random in cost."]
    assert _next(about) == NOTHING  # no seed tells equals apart


def test_a_wide_baseline_is_not_beaten_by_a_narrow_best() -> None:
    about = _studies([452.0, 455.0, 447.0], [452.0, 455.0, 447.0], [604.0, 447.0, 467.0])
    (tile,) = _tiles(about)
    assert tile.tone == "warn"
    assert list(certainty(about))[1:] == [
        "Cost is 55 ± 212 below the baseline random: it may be chance.",
    ]
    assert _next(about) == [
        "3 repetitions cannot tell ours and theirs from random by cost: take 6, with:",
        "studies.runs=6",
    ]


def test_the_sections_of_an_experiment_add_to_certainty_and_advice_except_in_a_matrix() -> None:
    """A section shows one point of a matrix."""
    section = Section("Own", [], certainty=("Certain.",), advice=("Do it.",))
    about = replace(_about(measures=_measures(ours=0.9, majority=0.5)), sections=(section,))
    assert list(certainty(about)) == ["Certain."]
    assert _next(about) == ["Do it."]
    about = _about(**_matrix([0.1, 0.2], 2, [0.05, 0.4, 0.1, 0.3]))
    with_section = replace(about, sections=(section,))
    assert list(certainty(with_section)) == list(certainty(about))
    assert _next(with_section) == _next(about)


def test_a_failure_names_the_command_that_shows_it_before_anything_else() -> None:
    failures = pd.DataFrame({"stage": ["stage1", "stage0"], "unit": ["a unit", "b"], "attempt": 1,
                             "kind": "error", "message": "no"})  # fmt: skip
    steps = _steps([0.3, 0.5, 0.5, 0.5], "eval_accuracy")
    about = _about(stages=_stages("succeeded", "failed"), failures=failures, steps=steps)
    assert _next(about) == [
        "1 stage failed. Read the error, then continue:",
        f"raypipe logs RUN_DIR 'a unit'\n{COMMAND}",
    ]
    stopped = _about(stages=_stages("succeeded", "interrupted"), steps=steps)
    assert _next(stopped) == ["1 stage not done. Continue:", COMMAND]
    assert [tile.label for tile in _tiles(stopped)] == ["held-out accuracy (higher is better)"]


@pytest.mark.parametrize(
    ("metric", "curve", "monitor"),
    [
        ("eval_loss", [5.0, 4.0, 3.6, 3.57, 3.6, 3.7, 3.81], "{metric: loss, mode: min, "),
        ("eval_accuracy", [0.1, 0.5, 0.8, 0.7, 0.6], "{metric: accuracy, mode: max, "),
        ("eval_loss", [5.0, 4.0, 3.0, 2.0, 1.0], ""),
        ("eval_loss", [5.0, 3.0, 3.0, 3.0, 3.0], ""),
    ],
)
def test_an_end_worse_than_the_best_names_the_monitor(metric, curve, monitor) -> None:
    text, code = _next(_about(steps=_steps(curve, metric)))
    assert ("is worse at the end" in text) == bool(monitor)
    assert monitor in code
    kept = _trials(best_step=[40], stopped_early=False)
    assert "monitor" not in str(_next(_about(steps=_steps(curve, metric), trials=kept)))


def _trainings(seeds: int, accuracy: list[float]) -> dict[str, pd.DataFrame]:
    """The tables of a matrix over the rate and a seed of the training itself."""
    values = iter(accuracy)
    variants, rows = [], []
    for rate in (0.1, 0.2):
        for seed in range(seeds):
            name = f"{rate}/{seed}"
            for key, value in (("train.rate", rate), ("train.seed", seed)):
                variants.append({"variant": name, "key": key, "value": str(value)})
            rows.append({"variant": name, "trial_id": name, "stage": "train", "loss_final": 0.1,
                         "status": "succeeded", "eval_accuracy": next(values)})  # fmt: skip
    return {"variants": pd.DataFrame(variants), "trials": pd.DataFrame(rows)}


def test_trainings_of_a_matrix_are_compared_by_means_over_any_seed() -> None:
    listed = "matrix: {axes: {train.rate: [0.1, 0.2], train.seed: [0, 1]}}\n"
    about = _about(CONFIGURATION + listed, **_trainings(2, [0.9, 0.5, 0.79, 0.81]))
    (tile,) = _tiles(about)
    assert (tile.label, tile.value, tile.note) == (
        "held-out accuracy (higher is better)", "0.80 ± 0.13",
        "rate=0.2, perhaps by chance before rate=0.1 (0.7); highest of 2",
    )  # fmt: skip
    assert "Varied: train.rate (2 values), 2 seeds." in asked(about)
    assert _next(about) == [
        "2 repetitions cannot tell rate=0.2 from rate=0.1 by held-out accuracy: take 6, with:",
        "--matrix 'train.seed=[0, 1, 2, 3, 4, 5]'",
    ]


def _function(
    calls: pd.DataFrame, better: str = "", command: str = "raypipe map m:f --run-dir r"
) -> RunResults:
    """A run of a function of ``C``, ``gamma`` and ``seed`` that returns ``score``."""
    own = (
        Column("call", "text", "Arguments."),
        *([Column("score", "real", "It.", better=better)] if better else []),  # type: ignore[arg-type]
        Column("duration_s", "real", "Time.", "s"),
        Column("attempt", "integer", "Number."),
    )
    table = Table("calls", "a call", own, open=True, axes=("C", "gamma"))
    declared = Declarations("", (table,), (), frozenset({"stages", "failures"}),
                            lambda: [f"calls/{place}" for place in range(len(calls))])  # fmt: skip
    known = calls[calls["score"].notna()]
    known = known.assign(call=[str(place) for place in known.index], duration_s=1.0, attempt=1)
    status = "succeeded" if len(known) == len(calls) else "failed"
    tables = {"stages": _stages(status), "calls": known}
    return RunResults(tables, "f", command, "function: m:f\narguments: {seed: 0}\n", declared)


@pytest.mark.parametrize(
    ("seeds", "scores", "more"),
    [
        ([0], [0.1, 0.2], "'seed=[0, 1, 2, 3, 4, 5]'"),
        ([3, 4], [0.1, 0.9, 0.5, 0.6], "'seed=[3, 4, 5, 6, 7, 8]'"),
        ([0, 3], [0.1, 0.9, 0.5, 0.6], "'seed=[0, 3, 4, 5, 6, 7]'"),
    ],
)
def test_calls_of_a_function_are_repeated_by_their_argument(seeds, scores, more) -> None:
    rows = [(C, seed) for C in (1, 2) for seed in seeds]
    calls = pd.DataFrame(rows, columns=["C", "seed"]).assign(score=scores)
    assert _next(_function(calls, "higher"))[-1] == more


def test_a_setting_whose_difficult_seeds_failed_is_not_the_best() -> None:
    calls = pd.DataFrame(
        {"C": C, "gamma": gamma, "seed": seed, "score": score + 0.1 * seed + 2.0 * (seed == 0)}
        for C, row in enumerate([[0.5, 0.6], [0.4, 0.3]])
        for gamma, score in enumerate(row)
        for seed in range(3)  # the first one is easy
    )
    last = (calls["C"] == 1) & (calls["gamma"] == 1)
    calls.loc[last & (calls["seed"] > 0), "score"] = np.nan
    (best,) = _function(calls, "higher").headlines
    assert (best.values, best.runs) == ({"C": 0, "gamma": 1}, 3)
    calls.loc[last & (calls["seed"] == 0), "score"] = 3.0
    (best,) = _function(calls, "higher").headlines
    assert (best.values, best.runs) == ({"C": 1, "gamma": 1}, 1)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("raypipe map m:f --run-dir r", "--minimize loss"),
        ("raypipe run f.yaml --run-dir r", "'minimize=[loss]'"),
        ("rp.map(f, ..., run_dir='r')", "minimize='loss'"),
    ],
)
def test_a_function_without_a_direction_shows_its_numbers_and_how_to_give_one(command, code):
    calls = pd.DataFrame({"C": [1, 2], "gamma": 1, "seed": 0, "score": [0.1, 0.2], "loss": 3.0})
    about = _function(calls, command=command)
    assert "Compared: C (2 values)." in list(asked(about))
    assert [tile.label for tile in _tiles(about)] == ["score", "loss"]
    text, shown = _next(about)
    assert (text.startswith("Say which number is better"), shown) == (True, code)
    assert not any("Say which" in text for text in _next(_function(calls, "higher")))


def test_calls_of_a_function_are_counted() -> None:
    calls = pd.DataFrame({"C": [1, 2], "gamma": 1, "seed": 0, "score": [0.1, None]})
    about = _function(calls)
    assert "1 of 2 calls succeeded." in list(asked(about))
    assert _next(about)[0] == "1 call failed. Read the error, then continue:"
    stopped = replace(about, tables={**about.tables, "stages": _stages("interrupted")})
    assert _next(stopped)[0] == "1 call not done. Continue:"


def test_failures_of_units_that_are_not_asked_for_are_counted_only() -> None:
    failures = pd.DataFrame({"stage": "calls", "unit": ["calls/x=1", "calls/x=13"], "attempt": 1,
                             "kind": "error", "message": ["one", "thirteen"]})  # fmt: skip

    def words(*units: str) -> str:
        declared = Declarations(core=frozenset({"stages", "failures"}), asked=lambda: units)
        return _words(replace(_about(failures=failures), declared=declared))

    more = "The table failures has 1 more, of units that are not asked for any more."
    first = f"1 attempt failed: error (1). Every stage succeeded in the end. {more}"
    assert first in words("calls/x=1")
    assert "thirteen" not in words("calls/x=1")
    assert "has 2 more" in words("calls/x=2")
    assert "not asked for" not in words("calls/x=1", "calls/x=13")


def test_the_page_repeats_the_run_and_has_its_command_once() -> None:
    environment = pd.DataFrame(
        {"hostname": ["n1"], "git_commit": "abc123", "git_dirty": True, "python": "3.11.7",
         "torch": "2.13.0", "cpus": 8, "memory_bytes": 2**30, "started_at": "2026-01-01",
         "run_id": "r", "variant": "base", "command_id": "a", "command": COMMAND}
    )  # fmt: skip
    about = _about(environment=environment)
    words = _words(about)
    assert "git checkout abc123 raypipe run config.yaml --run-dir repeated" in words
    assert "Files differed from this commit" in words
    assert words.count("2.13.0") == 1
    assert words.count(COMMAND) == 1
    moved = _words(replace(about, command="raypipe run y"))
    assert "compute more in it: raypipe run y" in moved
    files = report_files(about.tables, [], "toy", {}, COMMAND, CONFIGURATION)
    page = Page(files["index.html"].decode())
    (link,) = (attrs for attrs in page.all("a") if "download" in attrs)
    assert link["download"] == "config.yaml"
    assert str(link["href"]).startswith("data:text/plain;charset=utf-8,train%3A%20%7B")


def test_predictions_of_cards_have_a_table_and_are_no_result_of_the_run() -> None:
    row = {"stage": "train", "card": "L4", "precision": "bf16", "micro_batch": 8,
           "samples_per_s": 100.0, "note": "predicted, uncalibrated"}  # fmt: skip
    about = _about(card_predictions=pd.DataFrame([row, {**row, "card": "H100"}]))
    declared = replace(about.declared, core=CORE | {"card_predictions"})
    about = replace(about, declared=declared)
    assert about.bests == []
    assert "predicted, uncalibrated" in _words(about)
