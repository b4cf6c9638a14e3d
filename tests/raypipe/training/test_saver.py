"""Checkpoints are written while the training goes on, and never lost in silence."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import Regression, job
from safetensors.torch import load
from torch import nn

from raypipe.training import state
from raypipe.training.checkpoint import Checkpoint, CheckpointPart, CheckpointStore
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.saver import Saver
from raypipe.training.task import Loss, StepContext

WORKER = Worker(0, torch.device("cpu"))
LONG_S = 300


class Stepping(Regression):
    """Says when it is in a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.reached = step, threading.Event()

    def loss(self, model: nn.Module, batch: Any, context: StepContext) -> Loss:
        if context.step == self.step:
            self.reached.set()
        return super().loss(model, batch, context)


def test_the_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one waits for step 4, and still holds the weights after step 2."""
    task, real, reached = Stepping(3), CheckpointStore.save, []

    def save(store: CheckpointStore, checkpoint: Checkpoint, part: CheckpointPart | None) -> None:
        reached.append(task.reached.wait(LONG_S))
        real(store, checkpoint)

    monkeypatch.setattr(CheckpointStore, "save", save)
    given: dict[str, Any] = {"checkpoint_every": 2, "keep_checkpoints": 9, "schedule": "constant"}
    asked = job(task, tmp_path / "whole", **given)
    train(asked, WORKER)
    assert all(reached)
    store = CheckpointStore(asked.run_dir, "fit")
    short = job(Regression(), tmp_path / "short", steps=2, **given)
    train(short, WORKER)
    expected = load(short.run_dir.read(short.run_dir.model("fit")))
    found = store._read("step_00000002").model
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_that_cannot_be_written_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(store: CheckpointStore, checkpoint: Checkpoint, part: CheckpointPart | None) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "save", save)
    asked = job(Regression(), tmp_path)  # one checkpoint, at the end
    with pytest.raises(OSError, match="No space left"):
        train(asked, WORKER)
    assert not asked.run_dir.exists(asked.run_dir.model("fit"))


def test_one_is_written_at_a_time_and_an_error_is_raised_once() -> None:
    saver, busy, most = Saver(WORKER, sharded=False), [0], []
    assert saver.expected_s(1.0) == 0

    def write(fail: bool) -> None:
        busy[0] += 1
        most.append(busy[0])
        time.sleep(0.01)
        busy[0] -= 1
        if fail:
            raise OSError("full")

    for fail in (False, False, True):
        saver.start(write, fail)
    with pytest.raises(OSError, match="full"):
        saver.start(write, False)
    saver.start(write, False)
    saver.wait()
    assert most == [1, 1, 1, 1]
    assert saver.expected_s(1.0) >= 1.01
    saver.start(write, True)
    saver.close()  # it is logged: the training ends by another error


def test_a_state_that_is_written_does_not_follow_the_training() -> None:
    """Optimizers keep numbers of steps on the CPU, also those of a model on a GPU."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for steps in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if steps == 1:
            _, kept = state.gathered(model, optimizer, Worker(0, torch.device("cuda", 0)))
    assert optimizer.state[model.weight]["step"] == 2
    assert kept["state"]["weight"]["step"] == 1
