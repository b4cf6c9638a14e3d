"""Repeated measurements of a sweep: their order, what is recorded, and what a kill leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raypipe.errors import UnitError
from raypipe.launch.inline import InlineLauncher
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from raypipe.training.job import TrainingJob
from tests.raypipe.examples import sweeping
from tests.raypipe.study.test_sweep import row_of

YAML = """
experiment: example_sweep
train: {training: {steps: 40, effective_batch: 16, learning_rate: 0.01}}
sweep:
  stage: train
  steps: 2
  warmup_steps: 1
  constraints: {effective_batch: 16}
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


def measured(folder: Path) -> pd.DataFrame:
    return read_table(RunDirectory.at(folder), "trials").query("stage == 'sweep'")


def calm(job: TrainingJob, number: int) -> float:
    return {2: 50.0, 4: 80.0, 8: 100.0}[job.plan.micro_batch] * (1 + 0.01 * (number % 2))


def test_all_points_are_measured_once_then_all_again(machine, tmp_path) -> None:
    sizes = machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    assert sizes == [2, 4, 8] * 3
    table = measured(tmp_path / "run")
    assert set(table["status"]) == {"succeeded"}
    first = table[table["repeats"].isna()]
    assert table["repeats"].value_counts().to_dict() == dict.fromkeys(first["trial_id"], 2)
    best = row_of(tmp_path / "run", "recommendations")
    assert best["settings"]["train.training.micro_batch"] == 8
    values = table[table["micro_batch"] == 8]["samples_per_s"]
    assert best["value"] == values.median()
    assert (best["value_low"], best["value_high"]) == (values.min(), values.max())
    assert best["trial_id"] in set(first["trial_id"])
    assert "(median of 3, 100 to 101)" in best["reason"]
    front = read_table(RunDirectory.at(tmp_path / "run"), "pareto")
    assert set(front["trial_id"]) <= set(first["trial_id"])


def test_overlapping_ranges_are_a_tie(machine, tmp_path) -> None:
    noise = [1.0, 0.2, 1.6, 0.5, 0.9, 0.3, 1.4, 0.7, 1.2]
    machine(lambda job, number: 30.0 * noise[number % 9])
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    best = row_of(tmp_path / "run", "recommendations")
    assert best["reason"].startswith("The simplest of 3 points that are tied for the best of 3")


def test_a_kill_loses_one_measurement_and_repeats_none(machine, tmp_path) -> None:
    def dies(job: TrainingJob, number: int) -> float:
        if number == 6:
            raise Killed
        return calm(job, number)

    sizes = machine(dies)
    with pytest.raises(Killed):
        sweeping.sweep(YAML, tmp_path / "run")
    ledger = Ledger(RunDirectory.at(tmp_path / "run"), writable=False)
    before = dict(ledger.items("trials"))
    assert len(before) == 5
    assert len(sizes) == 6
    sizes = machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    assert sizes == [8, 2, 4, 8]
    after = dict(Ledger(RunDirectory.at(tmp_path / "run"), writable=False).items("trials"))
    assert after.items() >= before.items()
    # and a further command has nothing to do
    sizes = machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    assert not sizes


def test_a_point_that_fails_later_is_not_recommended(machine, tmp_path) -> None:
    def fails(job: TrainingJob, number: int) -> float:
        if number > 3 and job.plan.micro_batch == 8:
            raise UnitError(job.trial_id, "out_of_memory", "no memory left")
        return calm(job, number)

    sizes = machine(fails)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    assert sizes == [2, 4, 8, 2, 4, 8, 2, 4]
    best = row_of(tmp_path / "run", "recommendations")
    assert best["settings"]["train.training.micro_batch"] == 4
    assert list(measured(tmp_path / "run")["status"]).count("out_of_memory") == 1


def test_an_error_of_a_repeat_is_exit_status_1_and_tried_again(machine, tmp_path) -> None:
    def fails(job: TrainingJob, number: int) -> float:
        if number > 3 and job.plan.micro_batch == 2:
            raise UnitError(job.trial_id, "error", "the disk is full")
        return calm(job, number)

    machine(fails)
    failed = sweeping.sweep(YAML, tmp_path / "run")
    assert failed is not None
    assert "the disk is full" in failed
    sizes = machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    assert sizes == [2, 2]
    assert set(measured(tmp_path / "run")["status"]) == {"succeeded"}


def test_further_repeats_and_points_add_their_measurements(machine, tmp_path) -> None:
    sizes = machine(calm)
    assert sweeping.sweep(YAML, tmp_path / "run", ("sweep.repeats=1",)) is None
    assert sizes == [2, 4, 8]
    best = row_of(tmp_path / "run", "recommendations")
    assert "each point was measured once" in best["reason"]
    sizes = machine(lambda job, number: 120.0 if job.plan.micro_batch == 16 else calm(job, number))
    more = ("sweep.repeats=2", "sweep.axes.training.micro_batch=[2,4,8,16]")
    assert sweeping.sweep(YAML, tmp_path / "run", more) is None
    assert sizes == [16, 2, 4, 8, 16]
    best = row_of(tmp_path / "run", "recommendations")
    assert best["settings"]["train.training.micro_batch"] == 16


def test_a_quality_sweep_has_its_metric_on_the_front(machine, tmp_path) -> None:
    machine(calm)
    given = ("sweep.kind=quality", "sweep.metric=eval_loss", "sweep.axes.width=[1,8]")
    assert sweeping.sweep(YAML, tmp_path / "run", given) is None
    trials = measured(tmp_path / "run").set_index("trial_id")
    front = read_table(RunDirectory.at(tmp_path / "run"), "pareto").set_index("trial_id")
    assert set(front["metric"]) == {"eval_loss"}
    assert trials["eval_loss"].idxmin() in front.index
    assert (front["quality"] == trials.loc[front.index, "eval_loss"]).all()
    assert "one seed" in row_of(tmp_path / "run", "recommendations")["reason"]
    assert len(trials) == 6
