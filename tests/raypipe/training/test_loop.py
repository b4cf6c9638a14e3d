"""The training loop: what it stores and refuses, held-out measures, the best model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from example_tasks import (
    HeldOut,
    Regression,
    TwoPhases,
    assert_close,
    assert_equal,
    job,
    outcome,
    sample_at,
    weights,
)
from torch import Tensor, nn

from raypipe.store import tables as results
from raypipe.store.tables import Column
from raypipe.training.checkpoint import CheckpointStore
from raypipe.training.early_stopping import BestEvaluation, Monitor
from raypipe.training.ending import Agreement, Ending
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase, learning_rate
from raypipe.training.settings import MonitorSettings, TrainingSettings
from raypipe.training.tables import STEPS
from raypipe.training.task import Loss, StepContext, TrainTask
from tests import scenario

CPU = torch.device("cpu")


def run(job: TrainingJob, **more: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """The logged losses, the stored weights and the outcome."""
    found = train(job, Worker(0, CPU), **more)
    return *outcome(job), found


@pytest.mark.parametrize(
    ("seconds", "given", "expected"), scenario.cases(__file__, "tables")["checkpoints"]
)
def test_a_checkpoint_is_saved_when_a_restart_would_lose_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, given: Any, expected: list[int]
) -> None:
    monkeypatch.setattr("raypipe.training.loop.SAVE_S", seconds)
    asked = job(Regression(), tmp_path, keep_checkpoints=100, **given)
    run(asked)
    saved = asked.run_dir.list(asked.run_dir.checkpoints("fit"))
    assert saved == [f"step_{step:08}" for step in expected]


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "warmup-stable-decay"])
def test_learning_rates_follow_their_closed_forms(schedule: Any, floor: float) -> None:
    training = TrainingSettings(
        warmup_steps=4, schedule=schedule, min_lr_ratio=floor, decay_steps=5
    )
    phase = Phase("p", 14, 1, 0.2)
    rates = [learning_rate(training, phase, step) for step in range(14)]
    assert rates[:4] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    form: Callable[[float], float] = {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1 - done,
        "cosine": lambda done: math.cos(math.pi * done / 2) ** 2,
        "warmup-stable-decay": lambda done: 1 - math.sqrt(max(0.0, 2 * done - 1)),
    }[schedule]
    expected = [floor * 0.2 + (1 - floor) * 0.2 * form(n / 10) for n in range(10)]
    assert rates[4:] == pytest.approx(expected)
    assert min(rates) > floor * 0.2
    short = [learning_rate(training, Phase("p", 2, 1, 1.0), step) for step in range(2)]
    assert short == [0.5, 1.0]
    share = TrainingSettings(schedule=schedule, decay_steps=0.25)
    assert ("decay_steps" in share.identity()) == (schedule == "warmup-stable-decay")
    if schedule == "warmup-stable-decay":
        ends = [learning_rate(share, Phase("p", 8, 1, 1.0), step) for step in (6, 7)]
        assert ends == [1.0, pytest.approx(1 - math.sqrt(0.5))]


class Counted(Regression):
    counts = "tokens"

    def flops_per_sample(self, model: nn.Module) -> float:
        return 1e3


def test_a_training_reports_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are logged at a time, and those that are evaluated: steps 3 and 6, and the last."""
    monkeypatch.setattr("raypipe.training.loop.peak_flops", lambda *_: 1e6)  # a CPU has none
    rows: list[dict[str, Any]] = []
    given: dict[str, Any] = {"schedule": "linear", "warmup_steps": 2, "checkpoint_every": 2}
    asked = job(Counted(by_token=True, fail_at=5), tmp_path, (4, 4, 16, 1), **given)
    with pytest.raises(ConnectionError):
        train(asked, Worker(0, CPU))
    given |= {"log_every": 2, "eval_every": 3, "epochs": 2, "steps": None}
    whole = job(Counted(by_token=True), tmp_path / "whole", (4, 4, 16, 1), **given)
    outcome = train(replace(whole, attempt=2), Worker(0, CPU), rows.append)
    assert [row["step"] for row in rows] == [2, 3, 4, 6, 7]
    assert [("eval_mse" in row) for row in rows] == [False, True, False, True, True]
    steps = results.read_table(whole.run_dir, "steps")
    assert list(steps["step"]) == [2, 3, 4, 6, 7]
    assert list(steps["lr"]) == pytest.approx([1e-2, 1e-2, 8e-3, 4e-3, 2e-3])
    assert (set(steps["trial_id"]), set(steps["run_id"])) == ({"fit"}, {"run-1"})
    orders = [[sample_at(16 * s + i, whole.task, 0) for i in range(16)] for s in range(7)]
    tokens = [sum(i % 7 + 1 for i in order) for order in orders]
    spans = [tokens[:2], tokens[2:3], tokens[3:4], tokens[4:6], tokens[6:]]
    rates = steps["tokens_per_s"] / steps["samples_per_s"]
    assert list(rates) == pytest.approx([sum(span) / (16 * len(span)) for span in spans])
    assert outcome["steps"] == 7 == math.ceil(2 * 50 / 16)
    assert outcome["loss_final"] == rows[-1]["loss"]
    assert outcome["eval_mse"] == rows[-1]["eval_mse"]
    assert outcome["parameters"] == 2 * (25 + 5) + 6
    assert outcome["gpu_peak_bytes"] is outcome["gpu_util_mean"] is outcome["energy_j"] is None
    assert outcome["tokens_per_s"] == pytest.approx(steps["tokens_per_s"][1:].mean())
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
    assert 0 < outcome["loader_wait_share"] < 1
    assert outcome["flops_per_s"] == pytest.approx(1e3 * outcome["samples_per_s"])
    assert outcome["mfu"] == pytest.approx(outcome["flops_per_s"] / 1e6)
    for folder, attempt in ((asked.run_dir, 1), (whole.run_dir, 2)):
        samples = results.read_table(folder, "gpu_samples")
        assert set(samples["attempt"]) == {attempt}
        assert samples["gpu_uuid"].isna().all()
        assert (samples["rss_bytes"] > 2**26).all()
        assert samples["at"].dt.tz is not None
    assert samples["warmup"].any()  # that ends with the first logged steps
    # started again, a finished run does nothing
    model = whole.run_dir.model("fit")
    stored = whole.run_dir.read(model)
    again = train(replace(whole, task=Counted(by_token=True, fail_at=0)), Worker(0, CPU))
    assert (again["steps"], again["loss_final"]) == (7, outcome["loss_final"])
    assert results.read_table(whole.run_dir, "steps").equals(steps)
    assert whole.run_dir.read(model) == stored


def test_fp16_skips_a_step_that_overflows_and_resumes_with_its_scale(tmp_path: Path) -> None:
    def fp16(folder: str, **task: Any) -> TrainingJob:
        overflowing = Regression(by_token=True, dtype=torch.float32, nan_at=1, **task)
        return job(overflowing, tmp_path / folder, precision="fp16", checkpoint_every=2)

    whole = fp16("whole")
    expected, trained, outcome = run(whole)
    assert outcome["skipped_steps"] == 1
    assert [math.isnan(loss) for loss in expected] == [False, True] + [False] * 5
    with pytest.raises(ConnectionError):
        run(fp16("cut", fail_at=5))
    resumed = fp16("cut")
    found, stored, outcome = run(resumed)
    assert outcome["skipped_steps"] == 1  # counted before the cut
    assert found[2:] == expected[2:]
    assert_equal(stored, trained)
    last = [CheckpointStore(each.run_dir, "fit").newest() for each in (whole, resumed)]
    # a sample weighs 2 to 4 tokens, which halves the first scale, as the overflow does
    assert [each and each.scaler["scale"] for each in last] == [2.0**12] * 2


@pytest.mark.parametrize("steps", [7, 40])
def test_fp16_that_overflows_at_every_step_ends(tmp_path: Path, steps: int) -> None:
    overflowing = Regression(dtype=torch.float32, nan_at=ANY)
    asked = job(overflowing, tmp_path, precision="fp16", steps=steps)
    with pytest.raises(FloatingPointError, match=f"nan at step {min(steps, 10)}"):
        run(asked)
    assert not asked.run_dir.exists(asked.run_dir.model("fit"))


def test_recomputing_activations_changes_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every micro-batch of every step drops other activations."""
    calls, dropped, real = list[Tensor](), set[tuple[bool, ...]](), nn.Dropout.forward
    seeds = set[int]()

    def forward(self: nn.Dropout, x: Tensor) -> Tensor:
        calls.append(x)
        seeds.add(torch.initial_seed())
        kept = real(self, x)  # which a recomputation may end
        dropped.add(tuple((kept == 0).flatten().tolist()))
        return kept

    monkeypatch.setattr(nn.Dropout, "forward", forward)
    task, plan = Regression(dropout=0.3), (4, 4, 16, 1)
    expected, trained, _ = run(job(task, tmp_path / "plain", plan, seed=3))
    assert len(dropped) >= 7 * 4
    assert seeds == {(3_000_009 + step) * 4096 for step in range(7)}  # those of stored results
    calls.clear()
    found, stored, _ = run(job(task, tmp_path / "again", plan, gradient_checkpointing=True, seed=3))
    # forward twice in each micro-batch, once in the evaluation, three times in the first check
    assert len(calls) == 2 * 7 * 4 + 1 + 3
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert_close(stored, trained, 1e-12)  # and the names of the weights stay


class Unnamed(Regression):
    blocks = TrainTask.blocks


class Endless(Regression):
    def build_dataset(self) -> Any:
        return count()


def test_settings_without_an_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.precision = tf32: this cpu device lacks it"):
        run(job(Regression(), tmp_path, precision="tf32"))
    with pytest.raises(ValueError, match=r"gradient_checkpointing = true: this task names no"):
        run(job(Unnamed(), tmp_path, gradient_checkpointing=True))
    with pytest.raises(ValueError, match="muon: this task names no blocks with matrices"):
        run(job(Unnamed(), tmp_path, optimizer="muon"))
    with pytest.raises(ValueError, match="phase second: 5 samples per step"):
        train(job(TwoPhases(), tmp_path, (4, 1, 24, 6)), Worker(0, CPU, 6))
    with pytest.raises(ValueError, match=r"training\.epochs: the dataset is a stream"):
        run(job(Endless(), tmp_path, steps=None, epochs=1))
    assert not (tmp_path / "results").exists()


class Uncounted(Regression):
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], context: StepContext) -> Loss:
        found = super().loss(model, batch, context)
        return found._replace(weight=found.weight * (context.step != 2))


@pytest.mark.parametrize("given", [{}, {"log_every": 3, "checkpoint_every": 4}])
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Regression(nan_at=2), "the loss is nan at step 3; lower"),
        (Uncounted(), "the weights of step 3 sum to 0"),
    ],
)
def test_a_loss_that_is_no_number_ends_the_run(
    tmp_path: Path, given: dict[str, int], task: Regression, message: str
) -> None:
    """Logged steps are read late: step 3 is when step 4 is saved."""
    asked = job(task, tmp_path, **given)
    with pytest.raises(FloatingPointError, match=message):
        run(asked)
    assert CheckpointStore(asked.run_dir, "fit").newest() is None


class Normed(Regression):
    def build_model(self) -> nn.Module:
        return nn.Sequential(*super().build_model(), nn.BatchNorm1d(1)).to(self.dtype)


@pytest.mark.parametrize(("plan", "warned"), [((16, 1, 16, 1), False), ((8, 2, 16, 1), True)])
def test_batch_normalization_is_warned_about(
    tmp_path: Path, plan: tuple[int, int, int, int], warned: bool
) -> None:
    said: list[Any] = []
    run(job(Normed(), tmp_path, plan, steps=2), report=said.append)
    texts = [text for text in said if isinstance(text, str)]
    phrase = "6 is a batch normalization: its statistics are those of a micro-batch of 8 on"
    assert [phrase in text for text in texts] == [True] * warned


#: the measures of the evaluations, one every second step
CURVE = [5.0, 3.0, 4.0, 2.9, 3.5, 3.4, 1.0, 4.5]


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
    assert (outcome["steps"], outcome["stopped_early"]) == (stopped, stopped < 16)
    assert results.read_table(asked.run_dir, "steps")["step"].max() == stopped
    assert any("stopped at step" in text for text in map(str, said)) == (stopped < 16)
    assert_equal(weights(asked), checkpoints.read(f"step_{best:08d}").model)


def test_a_measure_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"monitor\.metric = loss: .* has negative, written"):
        train(curve(tmp_path, {"metric": "loss"}), Worker(0, CPU))


def test_evaluations_of_any_longer_training_are_compared_and_the_last(tmp_path: Path) -> None:
    """By a declared metric, whose name tells that more is better, rather than by the loss."""
    table = STEPS.extended([Column("eval_accuracy", "real", "Of held-out samples.")])
    asked = job(Regression(), tmp_path, eval_every=2, monitor=MonitorSettings())
    monitor = Monitor(replace(asked, steps_table=table), has_held_out=True)
    values = enumerate([1.0, 5.0, 9.0, 6.0, 8.0, 4.0, 7.0], start=1)
    rows = [{"step": step, "eval_loss": -step, "eval_accuracy": value} for step, value in values]
    best = [monitor.best(rows, until) for until in (None, *range(1, 8))]
    assert [each and each.step for each in best] == [7, None, 2, 2, 4, 4, 4, 4]
    assert best[-1] == BestEvaluation("eval_accuracy", 4, since=1, last=6)


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
    assert scheduled == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80]
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


@pytest.mark.parametrize(("rank", "wanted"), [(0, True), (0, False), (1, True)])
def test_of_several_workers_the_first_decides_whether_all_end(rank: int, wanted: bool) -> None:
    agreement, sums = Agreement(Ending(wanted), Worker(rank, CPU, 2)), dict[str, Tensor]()
    agreement.ask(sums)
    assert agreement.reached(sums) == (rank == 0 and wanted)
