"""Held-out measures, the best model, and stopping early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import HeldOut, Regression, assert_equal, job, weights
from torch import Tensor, nn

from raypipe.store import tables as results
from raypipe.store.tables import Column
from raypipe.training.checkpoint import CheckpointStore
from raypipe.training.early_stopping import Monitor
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.settings import MonitorSettings
from raypipe.training.tables import STEPS
from raypipe.training.task import StepContext
from tests import scenario

CPU = torch.device("cpu")
#: the measures of the evaluations, one every second step
CURVE = [5.0, 3.0, 4.0, 2.9, 3.5, 3.4, 1.0, 6.0]


class Curve(Regression):
    """An evaluation that follows a written curve: each call of it takes the next value."""

    trained = 0

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], context: StepContext) -> Any:
        self.trained = context.step + 1
        return super().loss(model, batch, context)

    def evaluate(self, model: nn.Module, device: torch.device, batch_size: int) -> dict[str, float]:
        value = CURVE[self.trained // 2 - 1]
        return {"written": value, "negative": -value}


def curve(folder: Path, monitor: dict[str, Any]) -> TrainingJob:
    monitored = MonitorSettings(**{"metric": "written", **monitor})
    return job(Curve(), folder, (8, 2, 16, 1), steps=16, eval_every=2, monitor=monitored)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """The weights of a run after each step, which do not depend on how long it goes on."""
    folder = tmp_path_factory.mktemp("whole")
    asked = job(Curve(), folder, (8, 2, 16, 1), steps=16, checkpoint_every=1, keep_checkpoints=100)
    train(asked, Worker(0, CPU))
    return CheckpointStore(asked.run_dir, "fit")


@pytest.mark.parametrize(
    ("monitor", "stopped", "best"), scenario.cases(__file__, "tables")["monitors"]
)
def test_the_best_model_is_the_result_and_patience_ends_the_run(
    tmp_path: Path, checkpoints: CheckpointStore, monitor: dict[str, Any], stopped: int, best: int
) -> None:
    asked = curve(tmp_path, monitor)
    said: list[Any] = []
    outcome = train(asked, Worker(0, CPU), said.append)
    assert outcome["steps"] == stopped
    assert results.read_table(asked.run_dir, "steps")["step"].max() == stopped
    assert any("stopped at step" in text for text in map(str, said)) == (stopped < 16)
    assert_equal(weights(asked), checkpoints.read(f"step_{best:08d}").model)


def test_a_measure_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"monitor\.metric = loss: .* has negative, written"):
        train(curve(tmp_path, {"metric": "loss"}), Worker(0, CPU))


def test_the_name_of_a_declared_metric_tells_what_is_better(tmp_path: Path) -> None:
    table = STEPS.extended([Column("eval_accuracy", "real", "Of held-out samples.")])
    asked = replace(job(Regression(), tmp_path, monitor=MonitorSettings()), steps_table=table)
    rows = [{"step": step, "eval_accuracy": 1 / step} for step in (1, 2)]
    best = Monitor(asked, has_held_out=True).best(rows)
    assert best is not None
    assert (best.metric, best.step) == ("eval_accuracy", 1)


def test_by_default_held_out_data_chooses_the_model(tmp_path: Path) -> None:
    """Few samples and a high rate overfit soon; cut and continued, it is the same to the digit."""

    def overfitting(folder: str, **given: Any) -> TrainingJob:
        task = HeldOut(samples=8, fail_at=given.pop("fail_at", None))
        named = {"steps": 80, "learning_rate": 0.1, "checkpoint_every": 4, "log_every": 80}
        return job(task, tmp_path / folder, (8, 1, 8, 1), **named, **given)

    whole = overfitting("whole")
    outcome = train(whole, Worker(0, CPU))
    rows = results.read_table(whole.run_dir, "steps")
    scheduled = [s for s in range(1, 81) if Monitor(whole, has_held_out=True).is_evaluated(s)]
    assert scheduled[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert list(rows["step"]) == [step for step in scheduled if step <= outcome["steps"]]
    best = rows.loc[rows["eval_loss"].idxmin()]
    assert outcome["best_step"] == best["step"]
    assert outcome["eval_loss"] == best["eval_loss"]
    assert outcome["stopped_early"] is True
    assert outcome["steps"] - best["step"] >= 0.4 * 80
    assert max(scheduled[: scheduled.index(outcome["steps"])]) - best["step"] < 0.4 * 80
    last = overfitting("last", monitor=None)
    assert "best_step" not in train(last, Worker(0, CPU))
    assert not all(torch.equal(v, weights(whole)[name]) for name, v in weights(last).items())
    names = ["steps", "best_step", "stopped_early", "eval_loss", "loss_final"]
    for fail_at in (5, 30):
        folder = f"cut-{fail_at}"
        with pytest.raises(ConnectionError):
            train(overfitting(folder, fail_at=fail_at), Worker(0, CPU))
        for fails in (None, outcome["steps"]):  # the second time it had stopped: it does nothing
            resumed = overfitting(folder, fail_at=fails)
            again = train(resumed, Worker(0, CPU))
            assert [again[name] for name in names] == [outcome[name] for name in names]
            assert_equal(weights(resumed), weights(whole))
