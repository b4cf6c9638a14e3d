"""Every sentence of the first screen, from the tables that give rise to it."""

from __future__ import annotations

import shlex
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from raypipe.report.about import About, Declarations
from raypipe.report.advice import advice
from raypipe.report.evaluations import noise
from raypipe.report.next_command import with_values
from raypipe.report.page import report_files
from raypipe.report.sections import Code, Section
from raypipe.report.summary import (
    asked,
    beaten,
    came_out,
    certainty,
    summary_section,
    training_tiles,
)
from raypipe.report.training_section import training_section
from raypipe.report.variants import variants_section
from raypipe.store.tables import Column, Table
from tests.raypipe.report.page_reader import Page

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


def _stages(*statuses: str) -> pd.DataFrame:
    at = pd.Timestamp("2026-03-02", tz="UTC")
    names = [f"stage{place}" for place in range(len(statuses))]
    return pd.DataFrame(
        {"run_id": "r", "stage": names, "status": statuses, "started_at": at, "duration_s": 1.0,
         "device": "cpu", "gpu_peak_bytes": None}
    )  # fmt: skip


def _about(
    configuration: str = CONFIGURATION, command: str = COMMAND, **tables: pd.DataFrame
) -> About:
    declared = Declarations("Classify things", (MEASURES,), METRICS, frozenset())
    core = frozenset({"stages", "trials", "steps", "variants", "failures", "environment", "search"})
    declared = Declarations(declared.sentence, (MEASURES,), METRICS, core)
    every = {"stages": _stages("succeeded"), **tables}
    return About(every, "toy", command, configuration, declared)


def _measures(**accuracy: float) -> pd.DataFrame:
    return pd.DataFrame({"method": list(accuracy), "accuracy": list(accuracy.values())})


def _steps(values: list[float], metric: str = "eval_loss", trial: str = "train") -> pd.DataFrame:
    steps = 10 * np.arange(1, len(values) + 1)
    return pd.DataFrame(
        {"trial_id": trial, "step": steps, "loss": 1.0, "samples_per_s": 9.0, metric: values}
    )


def _matrix(rates: list[float], seeds: int, score: list[float]) -> dict[str, pd.DataFrame]:
    """The tables of a matrix over the learning rate; scores by rate, then by seed."""
    variants, rows = [], []
    scores = iter(score)
    for rate in rates:
        for seed in range(seeds):
            name = f"rate={rate},seed={seed}"
            for key, value in (("train.rate", rate), ("seed", seed)):
                variants.append(
                    {"variant": name, "key": key, "value": str(value), "number": float(value)}
                )
            rows += [
                {"variant": name, "method": "ours", "accuracy": next(scores)},
                {"variant": name, "method": "majority", "accuracy": 0.1},
            ]
    return {"variants": pd.DataFrame(variants), "measures": pd.DataFrame(rows)}


def _advice(about: About) -> list[str]:
    return [part.text if isinstance(part, Code) else str(part) for part in advice(about)]


def test_what_was_asked() -> None:
    environment = pd.DataFrame(
        {"command_id": ["a", "b", "b"], "started_at": ["2026-01-01", "2026-01-02", "2026-01-02"],
         "hostname": ["old", "n1", "n2"], "cpus": 8, "memory_bytes": 32 * 2**30, "gpus": "H100"}
    )  # fmt: skip
    about = _about(
        **_matrix([0.1, 0.2], 3, [0.5] * 6),
        stages=_stages("succeeded", "succeeded", "skipped"),
        environment=environment,
    )
    assert list(asked(about)) == [
        "Classify things.",
        "Varied: train.rate (2 values), 3 seeds.",
        "2 of 3 stages succeeded on 2 nodes (H100, 16 CPUs, 64.0 GiB of memory).",
    ]
    plain = _about(measures=_measures(ours=0.9, majority=0.5))
    assert list(asked(plain)) == [
        "Classify things.", "1 of 1 stage succeeded.",
    ]  # fmt: skip
    several = _about(measures=_measures(ours=0.9, theirs=0.8, majority=0.5))
    assert "Compared: method (2 values, 1 baseline)." in list(asked(several))
    fewer = replace(MEASURES, name="later")
    declared = Declarations("Classify things", (MEASURES, fewer), METRICS, frozenset())
    several = _about(
        measures=_measures(ours=0.9, theirs=0.8, third=0.7, majority=0.5),
        later=_measures(ours=0.9, theirs=0.8, majority=0.5),
    )
    assert "Compared: method (3 values, 1 baseline)." in list(
        asked(replace(several, declared=declared))
    )


def test_what_came_out_is_the_best_against_the_baseline() -> None:
    (tiles,) = came_out(_about(measures=_measures(ours=0.9, majority=0.5)))
    (tile,) = tiles.tiles
    assert (tile.label, tile.value, tile.note) == (
        "accuracy (higher is better)", "0.9", "ours; 0.4 above majority (0.5)",
    )  # fmt: skip
    about = _about(measures=_measures(ours=0.4, majority=0.5))
    (tiles,) = came_out(about)
    assert (tiles.tiles[0].note, tiles.tiles[0].tone) == ("ours; 0.1 below majority (0.5)", "warn")
    assert beaten(about) == ["ours is not better than the baseline majority in accuracy."]


def test_a_table_that_was_not_declared_shows_its_numbers() -> None:
    own = pd.DataFrame({"run_id": "r", "name": ["a", "b"], "value": [1.0, 3.0]})
    (tiles,) = came_out(_about(squares=own))
    assert [(tile.label, tile.value) for tile in tiles.tiles] == [("value", "1 to 3")]
    assert came_out(_about()) == ["No table has a number."]


def test_a_training_shows_the_held_out_value_of_its_model() -> None:
    """That of the last step, unless held-out data chose the best one."""
    steps = _steps([5.0, 3.0, 3.57, 3.81])
    (tile,) = training_tiles(_about(steps=steps))
    assert (tile.label, tile.value, tile.note, tile.tone) == (
        "held-out loss (lower is better)", "3.81", "train, at the end; 3 at step 20", "warn",
    )  # fmt: skip
    for stopped, end in ((False, "the end"), (True, "the end, where it stopped early (40)")):
        kept = pd.DataFrame({"trial_id": ["train"], "stage": "train", "status": "succeeded",
                             "best_step": [20], "stopped_early": stopped})  # fmt: skip
        (tile,) = training_tiles(_about(steps=steps, trials=kept))
        assert (tile.value, tile.note, tile.tone) == (
            "3", f"train, best of 4 evaluations, at step 20; 3.81 at {end}", "")  # fmt: skip
    swept = "sweep: {stage: train, kind: quality, metric: eval_loss, mode: min}\n"
    (tile,) = training_tiles(_about(swept, steps=steps))
    assert tile.value == "3.81"  # the metric of a sweep keeps no model
    (tile,) = training_tiles(_about(steps=_steps([0.3, 0.5, 0.8], "eval_accuracy")))
    assert (tile.value, tile.note) == ("0.8", "train, at the end")
    trials = pd.DataFrame({"trial_id": ["train"], "stage": "train", "status": "succeeded",
                           "loss_final": [1.5]})  # fmt: skip
    (tile,) = training_tiles(_about(trials=trials))
    assert (tile.label, tile.value) == ("training loss", "1.5")


def test_one_run_has_no_interval() -> None:
    about = _about(measures=_measures(ours=0.9, majority=0.5))
    once = "One run, no interval over seeds."
    assert list(certainty(about)) == [once]
    assert _advice(about) == [
        "Repeat with 6 seeds to find out what is chance:",
        "raypipe run x.yaml data.n=2 --matrix runs=6",
    ]
    without_seed = _about("n: 3\n", measures=_measures(ours=0.9, majority=0.5))
    assert list(certainty(without_seed)) == [once]
    assert _advice(without_seed) == ["The tables suggest no next step."]


def test_seeds_that_decide() -> None:
    about = _about(**_matrix([0.1, 0.2], 3, [0.80, 0.81, 0.82, 0.60, 0.61, 0.62]))
    assert list(certainty(about)) == [
        "Means of 3 repetitions; ± is Student's 95 % confidence interval.",
        "Accuracy is 0.710 ± 0.025 above the baseline majority: more than chance.",
        "Accuracy is 0.2 (in every repetition) above the second best, ours, rate=0.2 (0.61): more "
        "than chance.",
    ]
    assert _advice(about) == ["The tables suggest no next step."]


def test_seeds_that_do_not_decide() -> None:
    about = _about(**_matrix([0.1, 0.2], 2, [0.05, 0.4, 0.1, 0.3]))
    assert list(certainty(about)) == [
        "Means of 2 repetitions; ± is Student's 95 % confidence interval.",
        "Accuracy is 0.1 ± 2.2 above the baseline majority: it may be chance.",
        "Accuracy is 0.03 ± 0.95 above the second best, ours, rate=0.2 (0.2): it may be chance.",
    ]
    assert _advice(about) == [
        "2 repetitions cannot tell ours, rate=0.1 from majority by accuracy: take 6.",
        f"{COMMAND} --matrix runs=6",
    ]


def _studies(ours: list[float], theirs: list[float], random: list[float]) -> About:
    table = Table(
        "studies",
        "a study",
        (Column("optimizer", "text", "Name."), Column("cost", "real", "Cost.", better="lower")),
        axes=("optimizer",),
        baselines=("random",),
        repeats="studies.runs",
    )
    found = {"ours": ours, "theirs": theirs, "random": random}
    rows = pd.DataFrame(
        [
            {"optimizer": name, "run": run, "cost": cost}
            for name, costs in found.items()
            for run, cost in enumerate(costs)
        ]
    )
    declared = Declarations("", (table,), (), frozenset({"stages"}))
    tables = {"stages": _stages("succeeded"), "studies": rows}
    return About(tables, "toy", COMMAND, CONFIGURATION, declared)


def test_what_a_seed_shares_is_no_difference() -> None:
    about = _studies([1.0, 5.0, 9.0], [1.5, 5.6, 9.4], [2.0, 6.1, 10.0])
    (best,) = about.headlines
    assert best.half > 9  # the seeds differ more than the optimizers
    assert best.to_baseline.mean == pytest.approx(1.0333, abs=1e-4)
    assert not best.to_baseline.may_be_chance
    assert list(certainty(about))[1:] == [
        "Cost is 1.03 ± 0.14 below the baseline random: more than chance.",
        "Cost is 0.50 ± 0.25 below the second best, theirs (5.5): more than chance.",
    ]


def test_several_that_only_reach_the_baseline_are_told_in_plural() -> None:
    about = _studies([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert beaten(about) == ["ours and theirs are not better than the baseline random in cost."]
    assert list(certainty(about))[1:] == [
        "Cost is that of the baseline random in every repetition.",
    ]
    assert _advice(about) == ["The tables suggest no next step."]  # no seed tells equals apart


def test_a_wide_baseline_is_not_beaten_by_a_narrow_best() -> None:
    about = _studies([452.0, 455.0, 447.0], [452.0, 455.0, 447.0], [604.0, 447.0, 467.0])
    (best,) = about.headlines
    assert best.leaders == "ours and theirs"
    (tiles,) = came_out(about)
    assert tiles.tiles[0].tone == "warn"
    assert list(certainty(about))[1:] == [
        "Cost is 55 ± 212 below the baseline random: it may be chance.",
    ]
    assert _advice(about) == [
        "3 repetitions cannot tell ours and theirs from random by cost: take 6.",
        f"{COMMAND} studies.runs=6",
    ]


@pytest.mark.parametrize(
    ("held_out", "training", "longer"),
    [
        ([5.0, 4.0, 3.0, 2.0, 1.0], 1.0, True),
        ([5.0, 3.0, 3.0, 3.0, 3.0], 1.0, False),  # level at the end
        ([5.0, 4.0, 3.6, 3.8, 4.2], 1.0, False),  # worse at the end
        ([5.0, 4.0, 3.0, 2.0, 1.0], 0.004, False),  # the training data are known by heart
    ],
)
@pytest.mark.parametrize("ours", [0.4, 0.9])
def test_only_a_held_out_metric_that_still_improves_asks_for_more_steps(
    held_out: list[float], training: float, longer: bool, ours: float
) -> None:
    """Whether the model loses to its baseline says nothing about its length."""
    steps = _steps(held_out).assign(loss=training)
    about = _about(measures=_measures(ours=ours, majority=0.5), steps=steps)
    assert longer == any("Train longer" in text for text in _advice(about))


def test_a_held_out_metric_has_the_baseline_that_it_declares() -> None:
    metric = Column("eval_regret", "real", "Regret.", "m", "lower", baseline="eval_random_regret")
    declared = Declarations("", (), (metric,), frozenset({"stages", "steps"}))
    steps = _steps([0.5, 0.4], "eval_regret").assign(eval_random_regret=[0.3, 0.3])
    about = About(
        {"stages": _stages("succeeded"), "steps": steps}, "toy", COMMAND, "", declared
    )  # fmt: skip
    tile = next(iter(training_tiles(about)))
    assert (tile.label, tile.note, tile.tone) == (
        "held-out regret (m, lower is better)", "train, at the end; random regret 0.3", "warn",
    )  # fmt: skip
    assert beaten(about) == [
        "train is not better than its baseline: held-out regret 0.4, random regret 0.3."
    ]


def test_a_metric_of_a_table_is_shown_once() -> None:
    about = _about(
        measures=_measures(ours=0.9, majority=0.5), steps=_steps([0.5, 0.9], "eval_accuracy")
    )
    assert list(training_tiles(about)) == []


def test_sections_add_to_certainty_and_advice() -> None:
    section = Section("Own", [], certainty=("Certain.",), advice=("Do it.",))
    about = replace(_about(measures=_measures(ours=0.9, majority=0.5)), sections=(section,))
    assert list(certainty(about)) == ["Certain."]
    assert _advice(about) == ["Do it."]


def test_in_a_matrix_the_intervals_speak_and_not_the_sections_of_one_point() -> None:
    section = Section("Own", [], certainty=("Certain.",), advice=("Do it.",))
    about = _about(**_matrix([0.1, 0.2], 2, [0.05, 0.4, 0.1, 0.3]))
    with_section = replace(about, sections=(section,))
    assert list(certainty(with_section)) == list(certainty(about))
    assert _advice(with_section) == _advice(about)


def test_values_that_are_equal_are_not_repeated() -> None:
    about = _about(measures=_measures(ours=0.9, theirs=0.9, majority=0.5))
    assert list(certainty(about)) == ["One run of each, no interval over seeds."]
    assert came_out(about)[0].tiles[0].note.startswith("ours and theirs; ")
    assert _advice(about) == ["The tables suggest no next step."]
    same = _about(**_matrix([0.1, 0.2], 3, [0.1] * 6))  # that of the baseline, too
    assert _advice(same) == ["The tables suggest no next step."]


def test_fewer_seeds_than_the_tests_need_ask_for_these_and_not_for_twice_as_many() -> None:
    about = _about(**_matrix([0.1, 0.2], 4, [0.5, 0.9, 0.4, 0.3, 0.45, 0.7, 0.6, 0.2]))
    assert _advice(about)[0].endswith(": take 6.")


def test_an_unfinished_run_shows_its_trainings_and_is_continued_before_it_is_repeated() -> None:
    about = _about(
        stages=_stages("succeeded", "interrupted"),
        steps=_steps([0.3, 0.5, 0.5, 0.5], "eval_accuracy"),
        squares=pd.DataFrame({"name": ["a", "b"], "value": [1.0, 3.0]}),
    )
    (tiles,) = came_out(about)
    assert [tile.label for tile in tiles.tiles] == ["held-out accuracy (higher is better)"]
    assert _advice(about) == ["1 stage not done. Continue:", COMMAND]


def test_the_summary_quotes_the_newest_command() -> None:
    environment = pd.DataFrame(
        {"command": ["raypipe run a", "raypipe run b --run-dir r"],
         "started_at": ["2026-01-01", "2026-01-02"], "hostname": "n", "command_id": ["a", "b"]}
    )  # fmt: skip
    about = _about(environment=environment)
    answers = summary_section(about).parts[0].answers
    assert answers[0][1][1] == Code("raypipe run b --run-dir r")


def test_a_failure_names_the_command_that_shows_it() -> None:
    failures = pd.DataFrame({"stage": ["stage1", "stage0"], "unit": ["a unit", "b"], "attempt": 1,
                             "kind": "error", "message": "no"})  # fmt: skip
    about = _about(stages=_stages("succeeded", "failed"), failures=failures)
    assert _advice(about) == [
        "1 stage failed. Read the error, then continue:",
        f"raypipe logs 'my run' 'a unit'\n{COMMAND}",
    ]
    assert _advice(_about(stages=_stages("succeeded", "interrupted"))) == [
        "1 stage not done. Continue:", COMMAND,
    ]  # fmt: skip


def test_an_end_worse_than_the_best_names_the_monitor() -> None:
    curve = [5.0, 4.0, 3.6, 3.57, 3.6, 3.7, 3.81]
    found = _advice(_about(steps=_steps(curve)))
    assert found[:2] == [
        "train: the held-out loss was best at step 40 (3.57) and is worse at the end (3.81). Keep "
        "the best model and stop early:",
        "raypipe run x.yaml data.n=2 "
        "'train.training.monitor={metric: loss, mode: min, patience: 3}'",
    ]
    higher = _advice(_about(steps=_steps([0.1, 0.5, 0.8, 0.7, 0.6], "eval_accuracy")))
    assert "{metric: accuracy, mode: max, patience: 3}" in higher[1]
    chosen = pd.DataFrame({"trial_id": ["train"], "stage": "train", "status": "succeeded",
                           "best_step": [40], "stopped_early": False})  # fmt: skip
    found = _advice(_about(steps=_steps(curve), trials=chosen))
    assert not any("monitor" in text for text in found)


def test_noise_is_no_worse_end() -> None:
    trials = [
        _steps(list(1 + 0.05 * np.random.default_rng(seed).normal(size=40)), trial=f"t{seed}")
        for seed in range(200)
    ]
    found = _about(steps=pd.concat(trials)).evaluations
    assert len(found) == 200
    assert sum(each.ends_worse for each in found) <= 6
    assert np.mean([noise(each.values) for each in found]) == pytest.approx(0.05, rel=0.1)
    assert noise(np.linspace(0, 1, 20)) == pytest.approx(0, abs=1e-12)


def test_a_curve_that_still_improves_asks_for_more_steps() -> None:
    about = _about(steps=_steps([5.0, 4.0, 3.0, 2.0, 1.0]))
    found = _advice(about)
    assert found[:2] == [
        "train: the held-out loss still improves at the end. Train longer:",
        "raypipe run x.yaml data.n=2 train.training.steps=200",
    ]
    given = replace(about, command=f"{COMMAND} train.training.steps=100")
    assert _advice(given)[:2] == found[:2]
    row = {"trial_id": ["train"], "stage": "train", "status": "succeeded", "best_step": [50]}
    for steps, stopped in ((60, False), (100, True)):  # the task limits them, or nothing improved
        trials = pd.DataFrame({**row, "steps": steps, "stopped_early": stopped})
        found = _advice(_about(steps=_steps([5.0, 4.0, 3.0, 2.0, 1.0]), trials=trials))
        assert not any("Train longer" in part for part in found)


@pytest.mark.parametrize(
    ("scores", "side", "value", "wider"),
    [
        ([0.2, 0.3, 0.9], "highest", "1", "[0.01, 0.1, 1, 10]"),
        ([0.9, 0.3, 0.2], "lowest", "0.01", "[0.001, 0.01, 0.1, 1]"),
    ],
)
def test_a_best_point_at_the_edge_of_an_axis_asks_for_more(scores, side, value, wider) -> None:
    about = _about(**_matrix([0.01, 0.1, 1.0], 1, scores))
    assert _advice(about)[:2] == [
        f"accuracy is best at the {side} train.rate that was tried, {value}. Try further values:",
        f"{COMMAND} --matrix 'train.rate={wider}'",
    ]


def test_a_best_point_within_an_axis_does_not() -> None:
    about = _about(**_matrix([0.01, 0.1, 1.0], 1, [0.2, 0.9, 0.3]))
    assert not any("further values" in text for text in _advice(about))


def test_nothing_is_proposed_beyond_the_smallest_and_the_largest_micro_batch() -> None:
    def texts(values: list[float], scores: list[float]) -> str:
        tables = _matrix(values, 1, scores)
        key = "train.training.micro_batch"
        tables["variants"] = tables["variants"].replace({"key": {"train.rate": key}})
        limits = "matrix: {constraints: {effective_batch: 8}}\ntrain: {scaling: {workers: 2}}\n"
        return "\n".join(_advice(_about(limits, **tables)))

    assert "further values" not in texts([1, 2, 4], [0.9, 0.3, 0.2])
    assert "further values" not in texts([1, 2, 4], [0.2, 0.3, 0.9])
    assert "micro_batch=[1, 2, 4, 6]'" in texts([2, 4, 6], [0.9, 0.3, 0.2])


def test_the_section_of_trainings_lists_every_held_out_column() -> None:
    steps = _steps([5.0, 3.0, 3.5, 4.0]).assign(eval_size=[0.1, 0.2, 0.3, 0.4])
    trials = pd.DataFrame(
        {"trial_id": ["train"], "stage": "train", "status": "succeeded", "steps": 40,
         "eval_loss": 4.0, "eval_size": 0.4}
    )  # fmt: skip
    about = _about(steps=steps, trials=trials)
    section = training_section(about)
    texts = [part for part in section.parts if isinstance(part, str)]
    assert texts == []  # the first screen warns
    view = section.parts[-1]
    assert view.visible_columns == [
        "trial_id", "status", "steps", "eval_loss", "best_loss", "eval_size",
    ]  # fmt: skip
    assert list(view.rows["best_loss"]) == ["3 at step 20"]
    names = [part.name for part in section.parts if hasattr(part, "figure")]
    assert names[:2] == ["eval_loss-train", "eval_size-train"]
    ring = next(
        line
        for line in section.parts[0].figure.axes[0].lines
        if line.get_label() == "_best"
    )  # fmt: skip
    assert ring.get_xydata().tolist() == [[20.0, 3.0]]


def test_the_page_repeats_the_run() -> None:
    environment = pd.DataFrame(
        {"hostname": ["n1"], "git_commit": "abc123", "git_dirty": True, "python": "3.11.7",
         "torch": "2.13.0", "cpus": 8, "memory_bytes": 2**30, "started_at": "2026-01-01",
         "run_id": "r", "variant": "base", "command_id": "a", "command": COMMAND}
    )  # fmt: skip
    files = report_files(
        {"stages": _stages("succeeded"), "environment": environment}, [], "toy", {}, COMMAND,
        CONFIGURATION,
    )  # fmt: skip
    page = Page(files["index.html"].decode())
    words = page.words
    assert "git checkout abc123 raypipe run config.yaml --run-dir repeated" in words
    assert "Files differed from this commit" in words
    assert words.count("2.13.0") == 1
    assert "Seeds: train.training.seed = 0." in words
    (link,) = (attrs for attrs in page.all("a") if "download" in attrs)
    assert link["download"] == "config.yaml"
    assert str(link["href"]).startswith("data:text/plain;charset=utf-8,train%3A%20%7B")


def test_the_page_has_the_command_once() -> None:
    environment = pd.DataFrame(
        {"hostname": ["n1"], "git_commit": None, "git_dirty": None, "python": "3.11.7",
         "command": COMMAND, "started_at": "2026-01-01", "command_id": "a", "run_id": "r",
         "variant": "base"}
    )  # fmt: skip
    tables = {"stages": _stages("succeeded"), "environment": environment}
    page = report_files(tables, [], "toy", {}, COMMAND, CONFIGURATION)["index.html"].decode()
    assert Page(page).words.count(COMMAND) == 1
    moved = report_files(tables, [], "toy", {}, "raypipe run y", CONFIGURATION)["index.html"]
    assert "compute more in it: raypipe run y" in Page(moved.decode()).words


def test_the_first_section_of_a_page_is_the_summary_and_tables_have_sections() -> None:
    tables = {"stages": _stages("succeeded"), "measures": _measures(ours=0.9, majority=0.5)}
    declared = Declarations("", (MEASURES,), (), frozenset({"stages"}))
    page = Page(report_files(tables, [], "toy", {}, declared=declared)["index.html"].decode())
    assert page.headings[:2] == ["summary", "measures"]
    for text in ("What was asked", "What came out", "How certain", "0.4 above majority (0.5)"):
        assert text in page.words


def _trainings(keys: tuple[str, ...], seeds: int, accuracy: list[float]) -> dict[str, pd.DataFrame]:
    """The tables of a matrix over the rate and a seed of the training itself."""
    values = iter(accuracy)
    variants, rows = [], []
    for rate in (0.1, 0.2):
        for seed in range(seeds):
            name = f"{rate}/{seed}"
            for key, value in zip(keys, (rate, seed), strict=True):
                variants.append({"variant": name, "key": key, "value": str(value)})
            rows.append({"variant": name, "trial_id": name, "stage": "train", "loss_final": 0.1,
                         "status": "succeeded", "eval_accuracy": next(values)})  # fmt: skip
    return {"variants": pd.DataFrame(variants), "trials": pd.DataFrame(rows)}


def test_trainings_of_a_matrix_are_compared_by_means_over_any_seed() -> None:
    tables = _trainings(("train.rate", "train.seed"), 2, [0.9, 0.5, 0.79, 0.81])
    listed = "matrix: {axes: {train.rate: [0.1, 0.2], train.seed: [0, 1]}}\n"
    about = _about(CONFIGURATION + listed, **tables)
    (tiles,) = came_out(about)
    (tile,) = tiles.tiles
    assert tile.label == "held-out accuracy (higher is better)"
    assert (tile.value, tile.note) == (
        "0.80 ± 0.13",
        "rate=0.2, perhaps by chance before rate=0.1 (0.7); highest of 2",
    )
    assert "Varied: train.rate (2 values), 2 seeds." in asked(about)
    assert _advice(about) == [
        "2 repetitions cannot tell rate=0.2 from rate=0.1 by held-out accuracy: take 6.",
        f"{COMMAND} --matrix 'train.seed=[0, 1, 2, 3, 4, 5]'",
    ]


def test_the_page_asks_for_one_number_of_seeds() -> None:
    """The paired tests of three values need seven; the command has each key once."""
    tables = _matrix([0.1, 0.2, 0.3], 2, [0.8, 0.7, 0.6, 0.8, 0.7, 0.7])
    configuration = CONFIGURATION + "matrix: {axes: {train.rate: [0.1, 0.2, 0.3]}, runs: 2}\n"
    command = "raypipe run x.yaml matrix.runs=2 --local"
    *_, asked_for, longer = _advice(_about(configuration, command, **tables))
    assert asked_for.endswith(": take 7.")
    assert longer == "raypipe run x.yaml matrix.runs=7 --local"
    below = [part for part in variants_section(tables, None).parts if isinstance(part, str)]
    assert not any("seeds" in text and "7" in text for text in below)


@pytest.mark.parametrize(
    ("command", "longer"),
    [
        ("raypipe run x --matrix=runs=3 --matrix runs=2 -r", "raypipe run x --matrix runs=6 -r"),
        ("raypipe run x --matrix runs=3", "raypipe run x --matrix runs=6"),
        ("raypipe run x a.runs=1", "raypipe run x a.runs=1 --matrix runs=6"),
    ],
)
def test_a_key_of_the_matrix_is_in_a_command_once(command: str, longer: str) -> None:
    assert with_values(command, matrix=("runs=6",)) == longer


def test_calls_of_a_function_are_repeated_by_their_argument() -> None:
    command = "raypipe map m:f 'C=[1,2]' seed=0 --run-dir r"

    def texts(seeds: list[int], scores: list[float], command: str = command) -> list[str]:
        rows = [(C, seed) for C in (1, 2) for seed in seeds]
        calls = pd.DataFrame(rows, columns=["C", "seed"]).assign(score=scores)
        return _advice(_function(calls, "higher", command))

    whole = "raypipe map m:f 'C=[1,2]' seed={} --run-dir r"
    assert texts([0], [0.1, 0.2])[-1] == whole.format("0..5")
    assert texts([3, 4], [0.1, 0.9, 0.5, 0.6])[-1] == whole.format("3..8")
    apart = "raypipe map m:f 'C=[1,2]' 'seed=[0, 3, 4, 5, 6, 7]' --run-dir r"
    assert texts([0, 3], [0.1, 0.9, 0.5, 0.6])[-1] == apart
    of_file = "raypipe run f.yaml --run-dir r"
    assert texts([0], [0.1, 0.2], of_file)[-1] == f"{of_file} seed=0..5"
    given = "raypipe run f.yaml arguments.seed=0 --run-dir r"
    assert texts([0], [0.1, 0.2], given)[-1] == "raypipe run f.yaml arguments.seed=0..5 --run-dir r"


def _function(
    calls: pd.DataFrame, better: str = "", command: str = "raypipe map m:f --run-dir r"
) -> About:
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
    known = calls[calls["score"].notna()] if "score" in calls else calls
    known = known.assign(call=[str(place) for place in known.index], duration_s=1.0, attempt=1)
    status = "succeeded" if len(known) == len(calls) else "failed"
    tables = {"stages": _stages(status), "calls": known}
    configuration = "function: m:f\narguments: {C: [0, 1, 2.0], gamma: 0..2, seed: 0}\n"
    return About(tables, "f", command, configuration, declared)


def _grid(scores: list[list[float]], seeds: int = 3) -> pd.DataFrame:
    """Calls with scores by ``C`` and ``gamma``, which vary by 0.1 with the seed."""
    return pd.DataFrame(
        {"C": C, "gamma": gamma, "seed": seed, "score": score + 0.1 * seed * (C + gamma) % 0.3}
        for C, row in enumerate(scores)
        for gamma, score in enumerate(row)
        for seed in range(seeds)
    )


def test_a_setting_whose_difficult_seeds_failed_is_not_the_best() -> None:
    calls = _grid([[0.5, 0.6], [0.4, 0.3]])
    calls.loc[calls["seed"] == 0, "score"] += 2.0  # an easy seed
    calls.loc[(calls["C"] == 1) & (calls["gamma"] == 1) & (calls["seed"] > 0), "score"] = np.nan
    (best,) = _function(calls, "higher").headlines
    assert (best.values, best.runs) == ({"C": 0, "gamma": 1}, 3)
    calls.loc[(calls["C"] == 1) & (calls["gamma"] == 1) & (calls["seed"] == 0), "score"] = 3.0
    (best,) = _function(calls, "higher").headlines
    assert (best.values, best.runs) == ({"C": 1, "gamma": 1}, 1)


def test_contenders_are_repeated_alone_if_they_are_few() -> None:
    about = _function(_grid([[0.1, 0.2, 0.3], [0.4, 0.92, 0.2], [0.1, 0.9, 0.2]]), "higher")
    *_, text, contenders, whole = _advice(about)
    assert text.endswith(", of these settings alone or of all 9:")
    assert contenders.startswith("raypipe map m:f --run-dir r seed=0..")
    assert contenders.endswith("'C=[1, 2.0]' 'gamma=[1]'")
    assert whole == contenders.partition(" 'C")[0]
    again = _advice(replace(about, command=contenders))
    assert shlex.split(again[-1]) == shlex.split(contenders)
    assert not any("of these settings alone" in each for each in again)


def test_a_function_without_a_direction_shows_its_numbers_and_how_to_give_one() -> None:
    calls = pd.DataFrame({"C": [1, 2], "gamma": 1, "seed": 0, "score": [0.1, 0.2], "loss": 3.0})
    about = _function(calls)
    assert "Compared: C (2 values)." in list(asked(about))
    (tiles,) = came_out(about)
    assert [tile.label for tile in tiles.tiles] == ["score", "loss"]
    assert "--minimize loss (or --maximize NAME)" in _advice(about)[0]
    assert _advice(about)[1] == "raypipe map m:f --run-dir r --minimize loss"
    of_file = _function(calls, command="raypipe run f.yaml --run-dir r")
    assert "minimize: [loss] (or maximize: [NAME])" in _advice(of_file)[0]
    assert _advice(of_file)[1] == "raypipe run f.yaml --run-dir r 'minimize=[loss]'"
    in_python = _function(calls, command="rp.map(f, ..., run_dir='r')")
    assert "such as minimize='loss' (or maximize='NAME')" in _advice(in_python)[0]
    assert not any("Say which" in text for text in _advice(_function(calls, "higher")))


def test_calls_of_a_function_are_counted() -> None:
    about = _function(pd.DataFrame({"C": [1, 2], "gamma": 1, "seed": 0, "score": [0.1, None]}))
    assert "1 of 2 calls succeeded." in list(asked(about))
    assert _advice(about)[0] == "1 call failed. Read the error, then continue:"
    stopped = replace(about, tables={**about.tables, "stages": _stages("interrupted")})
    assert _advice(stopped)[0] == "1 call not done. Continue:"


def test_failures_of_units_that_are_not_asked_for_are_counted_only() -> None:
    failures = pd.DataFrame({"stage": "calls", "unit": ["calls/x=1", "calls/x=13"], "attempt": 1,
                             "kind": "error", "message": ["one", "thirteen"]})  # fmt: skip
    tables = {"stages": _stages("succeeded"), "failures": failures}

    def words(*units: str) -> str:
        declared = Declarations(core=frozenset({"stages", "failures"}), asked=lambda: units)
        return Page(
            report_files(tables, [], "f", {}, declared=declared)["index.html"].decode()
        ).words

    more = "The table failures has 1 more, of units that are not asked for any more."
    assert f"1 attempt failed: error (1). Every stage succeeded in the end. {more}" in words(
        "calls/x=1"
    )
    assert "thirteen" not in words("calls/x=1")
    assert "has 2 more" in words("calls/x=2")
    assert "not asked for" not in words("calls/x=1", "calls/x=13")


def test_a_number_of_the_summary_is_not_repeated_in_its_table() -> None:
    tables = {"stages": _stages("succeeded"), "measures": _measures(ours=0.9, majority=0.5)}
    declared = Declarations("", (MEASURES,), (), frozenset({"stages"}))
    words = Page(
        report_files(tables, [], "toy", {}, declared=declared)["index.html"].decode()
    ).words
    assert words.count("0.4 above majority (0.5)") == 1
