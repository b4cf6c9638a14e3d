"""A finished training goes on: it equals an uninterrupted one, and what needs it is recomputed."""

from __future__ import annotations

import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load

from raypipe.commands import run as command
from raypipe.commands import seconds_of
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from raypipe.training.checkpoint import CheckpointStore
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from tests.command import EXAMPLES, finish, raypipe, start, table
from tests.scenario import cases, play

CASES = cases(__file__, "stored_results")


@pytest.fixture(autouse=True)
def _configuration(folder: Path) -> None:
    shutil.copy(Path(__file__).with_name("continuing.yaml"), folder / "c.yaml")


def run(folder: str, *words: str, expected: int = 0, **training: Any) -> str:
    """Run the experiment in a run directory of a name, with ``train.training`` settings."""
    given = [f"train.training.{key}={value}" for key, value in training.items()]
    return raypipe("run", "c.yaml", *given, *words, "--run-dir", folder, expected=expected)


def trained(folder: str) -> tuple[pd.DataFrame, dict[str, torch.Tensor]]:
    """The logged steps, and the weights."""
    run = RunDirectory.at(folder)
    steps = read_table(run, "steps").sort_values("step").set_index("step")
    return steps[["loss", "lr", "grad_norm"]], load(run.read(run.model("train")))


def assert_same_training(one: str, **training: Any) -> None:
    """A run equals one that trains at once with these settings."""
    run("whole", "--only", "train", **training)
    (steps, weights), (expected, whole) = trained(one), trained("whole")
    pd.testing.assert_frame_equal(steps, expected)
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
    names = ["steps", "best_step", "stopped_early", "eval_loss"]
    trials = [table(each, "trials") for each in (one, "whole")]
    pd.testing.assert_frame_equal(*(table.reindex(columns=names) for table in trials))


def assert_fresh(folder: str) -> None:
    """What depends on the model is of the stored one."""
    total = sum(float(each.sum()) for each in trained(folder)[1].values())
    assert list(table(folder, "probes")["weights"]) == pytest.approx([total], rel=1e-12)
    doubles = table(folder, "doubles")
    assert list(doubles["weights"]) == pytest.approx([2 * total], rel=1e-12)


@pytest.mark.parametrize("case", CASES["continues"], ids=str)
def test_a_training_that_goes_on_equals_an_uninterrupted_one(case: dict[str, Any]) -> None:
    """Bit for bit, with dropout; the stages behind it are computed again, and once."""
    first, then = case["first"], case["then"]
    run("short", **first)
    assert_fresh("short")
    run("short", **then)
    assert_same_training("short", **then)
    assert_fresh("short")
    assert list(table("short", "probes")["times"]) == [2]
    assert "nothing to do" in run("short", **then)


@pytest.mark.parametrize("case", CASES["commands"], ids=lambda case: case["name"])
def test_commands_on_a_stored_training(case: dict[str, Any]) -> None:
    play(case["commands"])


def test_the_progress_shows_the_monitored_measure_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.graph.progress._PLAIN_PERIOD_S", -1.0)
    output = run("run", "--only", "train", eval_every=1, monitor="{metric: mse}")
    assert re.search(r"/6  loss \S+  eval mse \S+  eval loss \S+  lr \S+  \S+ samples/s", output)


@pytest.mark.parametrize(("given", "reason"), CASES["fixed"], ids=str)
def test_a_training_that_its_length_decides_is_fixed(given: dict[str, Any], reason: str) -> None:
    training = {"schedule": "constant", "warmup_steps": 2, "steps": 6, **given}
    settings = TrainStageSettings(training=TrainingSettings(**training))
    assert reason in str(settings.fixed_by(6))


def test_a_continued_training_that_was_interrupted_has_to_end() -> None:
    """Its model is about to be replaced: it does not count as the shorter one any more."""
    run("run", checkpoint_every=3, monitor="null")
    run("run", "fail_at=10", expected=1, steps=12, checkpoint_every=3, monitor="null")
    ended = run("run", monitor="null", expected=2)
    assert "train.training.steps: stored 12, now 6" in ended
    run("run", steps=15, monitor="null")
    assert_same_training("run", steps=15, monitor="null")
    assert_fresh("run")


def test_a_checkpoint_of_other_settings_is_not_continued() -> None:
    """An unfinished training is nothing that is stored: another one may replace it."""
    run("run", "fail_at=5", expected=1, checkpoint_every=2)
    ended = run("run", "--only", "train", learning_rate=0.1)
    assert ended.count("is of a training with other settings; not used") == 2
    assert_same_training("run", learning_rate=0.1)


def test_a_training_whose_time_is_over_goes_on_as_if_uninterrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checkpoint is of a step that is neither logged nor due."""
    given: dict[str, Any] = {"steps": 40, "log_every": 5, "eval_every": "null"}
    budget = ("--only", "train", "--time-budget", "1h")
    with monkeypatch.context() as patch:
        patch.setattr(command, "_LEAST_RESERVE_S", 3600 - 0.5)
        output = run("run", *budget, "pause_s=0.1", expected=130, **given)
    assert "the time budget is nearly over" in output
    again = output.partition("the time budget is over; finished units are kept. Continue")[2]
    assert "--time-budget 1h" in again
    (saved,) = Path("run/checkpoints/train").glob("step_*")
    assert 0 < int(saved.name.removeprefix("step_")) < 40
    assert list(table("run", "stages")["status"]) == ["interrupted"]
    run("run", *budget, **given)
    assert_same_training("run", **given)


@pytest.mark.parametrize(("text", "seconds"), CASES["times"].items())
def test_times_are_read_as_people_and_slurm_write_them(text: str, seconds: float | None) -> None:
    wrong = pytest.raises(ConfigError, match=r"--time-budget .*must be a time")
    with nullcontext() if seconds else wrong:
        assert seconds_of(text) == seconds


@pytest.mark.slow
def test_two_workers_on_ray_end_at_the_same_step(tmp_path: Path) -> None:
    """With a stage that has not started yet; the next command does what is left."""
    environment = {"RAYPIPE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(EXAMPLES)}
    given = ["run", "c.yaml", "--run-dir", "run", "train.scaling.workers=2"]
    given += ["train.training.steps=400", "train.training.checkpoint_every=1000"]  # none is due
    given += ["train.training.log_every=5", "train.training.eval_every=null"]
    given += ["train.training.monitor=null"]  # neither evaluated nor ended on the way
    process = start(
        tmp_path, *given, "pause_s=0.3", "--time-budget", "130s", environment=environment
    )
    finish(process, 130)
    directory = RunDirectory.at(tmp_path / "run")
    statuses = read_table(directory, "stages").set_index("stage")["status"].to_dict()
    assert statuses == {"train": "interrupted"}
    (saved,) = CheckpointStore(directory, "train").steps
    assert saved < 400
    finish(start(tmp_path, *given, environment=environment))
    steps = read_table(directory, "steps")["step"]
    assert sorted(steps) == list(range(5, 401, 5))
    (trial,) = read_table(directory, "trials").to_dict("records")
    assert (trial["steps"], trial["workers"]) == (400, 2)
    assert len(read_table(directory, "doubles")) == 1
