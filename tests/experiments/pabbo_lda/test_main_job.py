"""The main job through the public command: without Ray, and its studies on Ray."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from experiments.pabbo_lda.experiment import EXPERIMENT
from tests.clusters import main_job
from tests.command import in_process, raypipe, table
from tests.experiments.runs import assert_declared

OPTIMIZERS = ("ga", "pabbo_small", "tpe", "random")
MODEL = "model: {d_model: 16, layers: 1, feed_forward: 16}"
CONFIG = main_job.CONFIG.replace(
    "cpus: 1, cache: false", f"final_seeds: 1, optimizers: [{', '.join(OPTIMIZERS)}]"
).replace("{policy_batch", f"{{{MODEL}, policy_batch")


def results_of(folder: Path) -> pd.DataFrame:
    """What a disturbed run must share with an undisturbed one."""
    columns = ["dataset", "optimizer", "run", "evaluation", "batch", "T", "value", "best_value"]
    history = table(folder, "study_history")[columns]
    return history.sort_values(columns[:4]).reset_index(drop=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    config = tmp_path_factory.mktemp("config") / "tiny.yaml"
    config.write_text(CONFIG)
    return config


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory) -> tuple[Path, str]:
    """The run directory and the output; `make test-all` has it on clusters."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, raypipe("run", config, "--run-dir", folder)


def test_every_stage_leaves_its_tables_and_the_report(whole):
    folder, output = whole
    assert "\x1b" not in output
    assert "no GPU" in output
    stages = table(folder, "stages")
    assert sorted(stages["stage"]) == sorted(main_job.STAGES)
    assert set(stages["status"]) == {"succeeded"}
    sizes = {"trials": 2, "studies": len(OPTIMIZERS) * 2, "environment": 1, "failures": 0}
    assert {name: len(table(folder, name)) for name in sizes} == sizes
    evaluations = table(folder, "evaluations")
    assert not evaluations.duplicated(["dataset", "seed", "T"]).any()
    assert len(evaluations) < table(folder, "studies")["unique_evaluations"].sum()
    assert_declared(folder, EXPERIMENT.tables)
    steps = table(folder, "steps")
    assert list(steps[steps["trial_id"] == "train_small"]["step"]) == [2, 4, 6]
    regret = table(folder, "regret")
    assert set(regret["method"]) == {"pabbo", "shipped", "random"}
    assert len(regret) == 2 * 3 * 6
    kinds = {file.name.partition("-")[0] for file in (folder / "report/figures").glob("*.png")}
    assert {"best_by_evaluation", "best_by_time", "final_bars", "final_boxes"} <= kinds
    assert "train_large" in (folder / "report/index.html").read_text()


@pytest.mark.slow
def test_the_tables_equal_those_of_a_run_on_ray(whole, config, launcher, tmp_path):
    words = ["run", config, "--run-dir", tmp_path, "lda.cache=false", "--only"]
    ended = in_process(launcher, *words, "evaluate_small", "lda", environment={})
    assert ended.status == 0, ended.output
    for name, keys, columns in (
        ("study_history", ["optimizer", "run", "evaluation"], ["batch", "T", "value"]),
        ("evaluations", ["dataset", "seed", "T"], ["value"]),
        ("studies", ["optimizer", "run"], ["best_T", "best_perplexity", "unique_evaluations"]),
        ("steps", ["trial_id", "step"], ["loss", "lr"]),
        ("regret", ["trial_id", "method", "step"], ["mean", "low", "high"]),
    ):
        sequential, parallel = (
            table(place, name).set_index(keys) for place in (whole[0], tmp_path)
        )
        assert len(parallel)
        sequential = sequential.loc[parallel.index, columns]
        pd.testing.assert_frame_equal(parallel[columns], sequential, rtol=1e-4, obj=name)


@pytest.mark.usefixtures("whole")
def test_the_plan_knows_what_it_took(config):
    def row(stage: str, *overrides: str) -> str:
        output = raypipe("plan", config, *overrides)
        return next(line for line in output.splitlines() if line.startswith(f"{stage} "))

    assert "unknown" not in row("train_small") + row("lda")
    assert "unknown" in row("train_small", "train_small.pabbo.horizon=5")


def test_again_does_nothing_and_one_more_run_only_what_is_new(whole, config):
    folder, _ = whole
    words = ("run", config, "--run-dir", folder)
    before = table(folder, "evaluations"), table(folder, "trials"), results_of(folder)
    assert "nothing to do" in raypipe(*words)
    assert "train_small: done before" in raypipe(*words, "lda.runs=3")
    evaluations = table(folder, "evaluations")
    old = evaluations[evaluations["seed"].isin(before[0]["seed"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(old, before[0])
    pd.testing.assert_frame_equal(table(folder, "trials"), before[1])
    history = results_of(folder)
    kept = history[history["run"] < 2].reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, before[2])
    assert set(history["run"]) == {0, 1, 2}
    assert set(table(folder, "summary")["runs"]) == {3}
    refused = raypipe(*words, "lda.runs=3", "lda.max_iter=3", expected=2)
    assert "lda.max_iter: stored 2, now 3" in refused


@pytest.mark.slow
def test_studies_follow_a_model_that_is_trained_further(config, tmp_path):
    """Their histories are those of the longer training; other studies stay as they are."""
    words = ["lda.optimizers=[pabbo_curves,random]", "lda.runs=1", "train_curves.scaling.workers=1"]
    curves = "{model: {layers: 1, embedding_depth: 2}, points: 12, steps: 3, held_out: 4}"
    words += [f"train_curves.pabbo={curves}", "train_curves.training.schedule=constant"]
    words += ["train_curves.training.learning_rate=0.1", "train_curves.training.warmup_steps=0"]
    words += ["train_curves.scaling.cpus_per_worker=1", "--only", "lda"]
    short, longer = "train_curves.training.steps=1", "train_curves.training.steps=8"
    raypipe("run", config, "--run-dir", tmp_path / "run", short, *words)
    before = results_of(tmp_path / "run").set_index("optimizer")
    said = raypipe("run", config, "--run-dir", tmp_path / "run", longer, *words)
    assert "lda: computed again: what it needs has gone on" in said
    raypipe("run", config, "--run-dir", tmp_path / "fresh", longer, *words)
    pd.testing.assert_frame_equal(results_of(tmp_path / "run"), results_of(tmp_path / "fresh"))
    after = results_of(tmp_path / "run").set_index("optimizer")
    pd.testing.assert_frame_equal(before.loc[["random"]], after.loc[["random"]])
    assert not before.loc[["pabbo_curves"]].equals(after.loc[["pabbo_curves"]])
    times = table(tmp_path / "run", "studies").set_index("optimizer")["command_id"]
    assert times["random"] != times["pabbo_curves"]
