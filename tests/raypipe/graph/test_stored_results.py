"""A finished training goes on: it equals an uninterrupted one, and what needs it is recomputed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from example_tasks import HeldOut
from safetensors.torch import load

from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import Ended, in_process

CONFIG = """
experiment: continuing
train:
  training: {steps: 6, effective_batch: 16, micro_batch: 8, schedule: constant, warmup_steps: 2,
             learning_rate: 0.01, log_every: 1, eval_every: 3}
  scaling: {cpus_per_worker: 1}
"""

Run = Callable[..., Ended]
CASES = yaml.safe_load(Path(__file__).with_name("stored_results.yaml").read_text())


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the experiment in a run directory of a name, with ``train.training`` settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)

    def run(folder: str, *words: str, expected: int = 0, **training: Any) -> Ended:
        given = [f"train.training.{key}={value}" for key, value in training.items()]
        cache = {"RAYPIPE_CACHE": str(tmp_path / "cache")}
        ended = in_process(
            InlineLauncher(), "run", "c.yaml", *given, *words, "--run-dir", tmp_path / folder,
            environment=cache,
        )  # fmt: skip
        assert ended.status == expected, ended.output
        return ended

    return run


def trained(tmp_path: Path, folder: str) -> tuple[pd.DataFrame, dict[str, torch.Tensor]]:
    """The logged steps, and the weights."""
    run = RunDirectory.at(tmp_path / folder)
    steps = read_table(run, "steps").sort_values("step").set_index("step")
    return steps[["loss", "lr", "grad_norm"]], load(run.read(run.model("train")))


def assert_same_training(tmp_path: Path, one: str, other: str) -> None:
    (steps, weights), (expected, whole) = trained(tmp_path, one), trained(tmp_path, other)
    pd.testing.assert_frame_equal(steps, expected)
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
    names = ["steps", "best_step", "stopped_early", "eval_loss"]
    trials = [read_table(RunDirectory.at(tmp_path / each), "trials") for each in (one, other)]
    pd.testing.assert_frame_equal(*(table.reindex(columns=names) for table in trials))


def probes(tmp_path: Path, folder: str) -> pd.DataFrame:
    return read_table(RunDirectory.at(tmp_path / folder), "probes")


def assert_fresh(tmp_path: Path, folder: str) -> None:
    """What depends on the model is of the stored one."""
    total = sum(float(each.sum()) for each in trained(tmp_path, folder)[1].values())
    assert list(probes(tmp_path, folder)["weights"]) == pytest.approx([total], rel=1e-12)
    doubles = read_table(RunDirectory.at(tmp_path / folder), "doubles")
    assert list(doubles["weights"]) == pytest.approx([2 * total], rel=1e-12)


@pytest.mark.parametrize("case", CASES["continues"], ids=str)
def test_a_training_that_goes_on_equals_an_uninterrupted_one(
    command: Run, tmp_path: Path, case: dict[str, Any]
) -> None:
    """Bit for bit, with dropout; the stages behind it are computed again, and once."""
    first, then = case["first"], case["then"]
    command("short", **first)
    assert_fresh(tmp_path, "short")
    command("short", **then)
    command("whole", **then)
    assert_same_training(tmp_path, "short", "whole")
    assert_fresh(tmp_path, "short")
    assert list(probes(tmp_path, "short")["times"]) == [2]
    again = command("short", **then)
    assert "nothing to do" in again.output


@pytest.mark.parametrize("case", CASES["refused"], ids=str)
def test_what_is_not_the_beginning_of_the_longer_training_is_refused(
    command: Run, tmp_path: Path, case: dict[str, Any]
) -> None:
    first, then = case["first"], case["then"]
    command("run", **first)
    before = trained(tmp_path, "run")
    ended = command("run", **then, expected=2)
    for message in case["messages"]:
        assert message in ended.output
    pd.testing.assert_frame_equal(trained(tmp_path, "run")[0], before[0])
    assert "nothing to do" in command("run", **first).output


def test_phases_that_depend_on_the_length_are_noticed(command: Run, tmp_path: Path) -> None:
    """The settings cannot tell; the schedule that the checkpoint belongs to can."""
    command("run", "halves=true", "--only", "train")
    ended = command("run", "halves=true", "--only", "train", expected=1, steps=12)
    assert "its schedule is not the beginning of the longer one" in ended.output
    shown = command("run", "halves=true", "--only", "train").output  # the failure is not asked for
    assert "step" not in shown
    assert "nothing to do" in command("run", "halves=true", "--only", "train").output


@pytest.mark.parametrize("keep", [True, False])
def test_without_its_last_state_a_training_does_not_start_from_the_weights(
    command: Run, tmp_path: Path, keep: bool
) -> None:
    command("run", keep_state=str(keep).lower())
    folder = tmp_path / "run" / "checkpoints"
    if keep:
        assert [each.name for each in folder.glob("*/step_*")] == ["step_00000006"]
        shutil.rmtree(folder)
    assert not folder.exists() or not list(folder.iterdir())
    ended = command("run", steps=12, expected=2)
    assert "its last checkpoint is not stored" in ended.output
    assert "nothing to do" in command("run").output


def test_a_continued_training_that_was_interrupted_has_to_end(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is about to be replaced: it does not count as the shorter one any more."""
    command("run", checkpoint_every=3, monitor="null")
    with monkeypatch.context() as patch:
        patch.setattr(HeldOut, "loss", _failing_at(10))
        command("run", steps=12, checkpoint_every=3, monitor="null", expected=1)
    ended = command("run", monitor="null", expected=2)
    assert "train.training.steps: stored 12, now 6" in ended.output
    command("run", steps=15, monitor="null")
    command("whole", steps=15, monitor="null")
    assert_same_training(tmp_path, "run", "whole")
    assert_fresh(tmp_path, "run")


def test_a_checkpoint_of_other_settings_is_not_continued(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished training is nothing that is stored: another one may replace it."""
    with monkeypatch.context() as patch:
        patch.setattr(HeldOut, "loss", _failing_at(5))
        command("run", checkpoint_every=2, expected=1)
    ended = command("run", learning_rate=0.1)
    assert "is of a training with other settings; not used" in ended.output
    command("whole", learning_rate=0.1)
    assert_same_training(tmp_path, "run", "whole")


def _failing_at(step: int) -> Callable[..., Any]:
    real = HeldOut.loss

    def loss(self: HeldOut, model: Any, batch: Any, context: Any) -> Any:
        if context.step == step:
            raise ConnectionError("the machine went away")
        return real(self, model, batch, context)

    return loss


def test_points_of_a_matrix_with_other_lengths_are_variants(command: Run, tmp_path: Path) -> None:
    command("run", "matrix.train.training.steps=[6,12]", monitor="null")
    run = RunDirectory.at(tmp_path / "run")
    lengths = read_table(run, "trials").set_index("variant")["steps"].to_dict()
    assert lengths == {"train.training.steps=6": 6, "train.training.steps=12": 12}
    assert read_table(run, "probes")["weights"].nunique() == 2
