"""Rounds of a sweep: what is measured again, what is recorded, and what a kill leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raypipe.errors import UnitError
from raypipe.launch.inline import InlineLauncher
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import read_table
from raypipe.training.job import TrainingJob
from tests.raypipe.examples import sweeping
from tests.raypipe.sweep.test_sweep import row_of

YAML = """
experiment: example_sweep
train: {training: {steps: 40, effective_batch: 16, learning_rate: 0.01}}
sweep:
  stage: train
  steps: 2
  warmup_steps: 1
  constraints: {effective_batch: 16}
  rounds: {seconds: 1000, most: 8}
  axes: {training.micro_batch: [2, 4, 8]}
"""
Speed = Callable[[TrainingJob, int], float]


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Speed], list[int]]:
    """Let a function of the job and its number set the speed; the micro-batches in their order."""
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    train = InlineLauncher.train

    def use(speed: Speed) -> list[int]:
        sizes: list[int] = []

        def measured(self: InlineLauncher, job: TrainingJob, report: Any, *rest: Any) -> Any:
            if not job.measured:
                return train(self, job, report, *rest)
            sizes.append(job.plan.micro_batch)
            found = speed(job, len(sizes))
            return train(self, job, report, *rest) | {"samples_per_s": found}

        monkeypatch.setattr(InlineLauncher, "train", measured)
        return sizes

    return use


def rounds(folder: Path) -> pd.DataFrame:
    return read_table(RunDirectory.at(folder), "sweep_rounds").sort_values(["round", "place"])


def calm(job: TrainingJob, number: int) -> float:
    return {2: 50.0, 4: 80.0, 8: 100.0}[job.plan.micro_batch] * (1 + 0.01 * (number % 2))


def test_points_are_measured_in_turns_until_it_is_decided(machine, tmp_path) -> None:
    sizes = machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    table = rounds(tmp_path / "run")
    assert list(table["round"]) == sorted(table["round"])
    assert table.groupby("round")["trial_id"].nunique().iloc[0] == 3
    assert 3 <= table["round"].max() < 8
    assert len(table) == len([size for size in sizes if size])
    assert sizes[3:6] != sizes[6:9] or sizes[3:6] == sizes[6:9][::-1]
    assert set(table["status"]) == {"succeeded"}
    # the logged steps are those of the first round, once
    steps = read_table(RunDirectory.at(tmp_path / "run"), "steps").query("trial_id != 'train'")
    assert not steps.duplicated(["trial_id", "step"]).any()
    best = row_of(tmp_path / "run", "recommendations")
    assert best["settings"]["train.training.micro_batch"] == 8
    assert best["decided"]
    assert best["runner_up"] == "micro_batch=4"
    assert best["ratio_low"] < best["ratio"] < best["ratio_high"]
    assert best["ratio"] == pytest.approx(1.25, rel=0.02)
    assert best["value_low"] < best["value"] < best["value_high"]
    assert "Decided after" in best["reason"]
    assert "try larger ones, e.g. 'sweep.axes.training.micro_batch=[8,16]'" in best["reason"]
    trials = read_table(RunDirectory.at(tmp_path / "run"), "trials").set_index("micro_batch")
    assert trials.query("stage == 'sweep'")["samples_per_s"][8] == pytest.approx(best["value"])


def test_noise_that_hides_the_difference_is_said(machine, tmp_path) -> None:
    noise = [1.0, 0.2, 1.6, 0.5, 0.9, 0.3, 1.4, 0.7, 1.2, 0.4, 1.9]
    machine(lambda job, number: 30.0 * noise[number % 11])
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    table = rounds(tmp_path / "run")
    assert list(table.groupby("round")["trial_id"].nunique()) == [3] * 8
    best = row_of(tmp_path / "run", "recommendations")
    assert not best["decided"]
    assert best["reason"].startswith("Cannot tell which of 3 points is the fastest: micro_batch=")
    for part in (
        "by rule",
        "varied by",
        "sweep.rounds.most = 8 is reached",
        "sweep.rounds.most=16",
    ):
        assert part in best["reason"]
    # with more rounds the same sweep goes on
    machine(calm)
    more = ("sweep.rounds.most=40",)
    assert sweeping.sweep(YAML, tmp_path / "run", more) is None
    again = rounds(tmp_path / "run")
    assert len(again) > len(table)
    pd.testing.assert_frame_equal(again.head(len(table)), table)


def test_a_drift_of_the_machine_does_not_decide(machine, tmp_path) -> None:
    """Each measurement finds the machine slower by a tenth than the one before."""
    machine(lambda job, number: 100 * 0.9**number * (1.15 if job.plan.micro_batch == 8 else 1))
    assert sweeping.sweep(YAML, tmp_path / "run", ("sweep.rounds.most=30",)) is None
    best = row_of(tmp_path / "run", "recommendations")
    assert best["settings"]["train.training.micro_batch"] == 8 or not best["decided"]


def test_a_kill_loses_one_measurement_and_repeats_none(machine, tmp_path) -> None:
    def dies(job: TrainingJob, number: int) -> float:
        if number == 6:
            raise Killed
        return calm(job, number)

    sizes = machine(dies)
    with pytest.raises(Killed):
        sweeping.sweep(YAML, tmp_path / "run")
    ledger = Ledger(RunDirectory.at(tmp_path / "run"), writable=False)
    before = dict(ledger.items("sweep_rounds"))
    assert len(before) == 5
    assert len(sizes) == 6
    sizes = machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    after = dict(Ledger(RunDirectory.at(tmp_path / "run"), writable=False).items("sweep_rounds"))
    assert after.items() >= before.items()
    assert min(row["round"] for key, row in after.items() if key not in before) == 3
    assert row_of(tmp_path / "run", "recommendations")["decided"]
    # and a further command has nothing to do
    sizes = machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    assert not sizes


def test_a_point_that_fails_later_is_not_recommended(machine, tmp_path) -> None:
    def fails(job: TrainingJob, number: int) -> float:
        if job.repeated and job.plan.micro_batch == 8:
            raise UnitError(job.trial_id, "out_of_memory", "no memory left")
        return calm(job, number)

    machine(fails)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    best = row_of(tmp_path / "run", "recommendations")
    assert best["settings"]["train.training.micro_batch"] == 4
    table = rounds(tmp_path / "run")
    assert list(table["status"]).count("out_of_memory") == 1


def test_an_error_in_a_round_is_exit_status_1_and_tried_again(machine, tmp_path) -> None:
    def fails(job: TrainingJob, number: int) -> float:
        if job.repeated and job.plan.micro_batch == 2:
            raise UnitError(job.trial_id, "error", "the disk is full")
        return calm(job, number)

    machine(fails)
    failed = sweeping.sweep(YAML, tmp_path / "run")
    assert failed is not None
    assert "the disk is full" in failed
    machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    assert row_of(tmp_path / "run", "recommendations")["decided"]


def test_a_grown_sweep_measures_old_points_next_to_the_new(machine, tmp_path) -> None:
    """The machine was twice as fast then: the new point would lose without common rounds."""
    machine(lambda job, number: 2 * calm(job, number))
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    machine(lambda job, number: 120.0 if job.plan.micro_batch == 16 else calm(job, number))
    more = ("sweep.axes.training.micro_batch=[2,4,8,16]",)
    assert sweeping.sweep(YAML, tmp_path / "run", more) is None
    best = row_of(tmp_path / "run", "recommendations")
    assert best["settings"]["train.training.micro_batch"] == 16
    assert best["edges"] is None  # an effective batch of 16 allows no larger one


def test_one_measurement_each_is_said(machine, tmp_path) -> None:
    sizes = machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run", ("sweep.rounds.most=1",)) is None
    assert sizes == [2, 4, 8]
    best = row_of(tmp_path / "run", "recommendations")
    assert "each point was measured once" in best["reason"]
    # rounds later start from these measurements
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    assert row_of(tmp_path / "run", "recommendations")["decided"]
    assert rounds(tmp_path / "run")["round"].min() == 0


def test_a_quality_sweep_has_its_metric_on_the_front(machine, tmp_path) -> None:
    machine(calm)
    given = ("sweep.kind=quality", "sweep.metric=eval_loss", "sweep.axes.width=[1,8]")
    assert sweeping.sweep(YAML, tmp_path / "run", given) is None
    trials = read_table(RunDirectory.at(tmp_path / "run"), "trials").set_index("trial_id")
    front = read_table(RunDirectory.at(tmp_path / "run"), "pareto").set_index("trial_id")
    assert set(front["metric"]) == {"eval_loss"}
    assert trials.query("stage == 'sweep'")["eval_loss"].idxmin() in front.index
    assert (front["quality"] == trials.loc[front.index, "eval_loss"]).all()
    assert "one seed" in row_of(tmp_path / "run", "recommendations")["reason"]
    assert "sweep_rounds" not in Ledger(RunDirectory.at(tmp_path / "run"), writable=False).tables()
