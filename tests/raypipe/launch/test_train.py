"""The training core on Ray Train: what one process computes, any group computes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raypipe.errors import BatchLimit, UnitError
from raypipe.faults import VARIABLE
from raypipe.launch.inline import InlineLauncher
from raypipe.training.job import TrainingJob
from raypipe.training.recovery import train_to_the_end
from tests.raypipe.examples import example_tasks
from tests.raypipe.examples.example_tasks import Regression, assert_close, outcome

#: losses and weights
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def job(folder: Path, micro: int, accumulation: int, workers: int, steps: int = 12) -> TrainingJob:
    plan = (micro, accumulation, 16, workers)
    return example_tasks.job(Regression(), folder, plan, steps=steps, checkpoint_every=4, seed=3)


def ignore(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Outcome:
    """One big batch in one process."""
    big = job(tmp_path_factory.mktemp("big"), 16, 1, 1)
    InlineLauncher().train(big, ignore)
    return outcome(big)


def assert_same(found: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=0)
    assert_close(found[1], expected[1], 1e-10)


@pytest.mark.slow
def test_two_workers_equal_the_big_batch(launcher, tmp_path, reference):
    two = job(tmp_path, 4, 2, 2)
    told = []
    returned = launcher.train(two, told.append)
    assert_same(outcome(two), reference)
    assert returned["steps"] == 12
    assert returned["loss_final"] == pytest.approx(reference[0][-1])
    assert returned["samples_per_s"] > 0
    assert [row["step"] for row in told] == list(range(1, 13))


@pytest.mark.parametrize(
    ("faults", "kind", "plan"),
    [
        # the kill is of attempt 1 only, which here ends by the out-of-memory before step 6
        ("oom:micro_batch>8,kill_worker:step=6", "out_of_memory", (8, 2)),
        pytest.param("kill_worker:step=6", "worker_died", (16, 1), marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_and_a_death_give_the_same_curve(
    launcher, tmp_path, reference, monkeypatch, faults, kind, plan
):
    """Both faults are rehearsed where they happen: in the worker's process."""
    monkeypatch.setenv(VARIABLE, faults)
    told: list[tuple[int, str, int]] = []

    def on_failure(job: TrainingJob, error: UnitError, what: str) -> None:
        told.append((job.attempt, error.kind, job.plan.micro_batch))

    first = job(tmp_path, 16, 1, 1)
    last, _ = train_to_the_end(first, lambda job: launcher.train(job, ignore), on_failure)
    assert told == [(1, kind, 16)]
    assert (last.plan.micro_batch, last.plan.accumulation, last.attempt) == (*plan, 2)
    assert_same(outcome(last), reference)  # with no step twice


class Failing(Regression):
    """Rank 1 fails at its fourth step; rank 0 waits for its gradients, and does not by itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def loss(self, model, batch, context):
        if dist.get_rank() == 1 and context.step == 3:
            if self.kind == "out_of_memory":
                raise torch.OutOfMemoryError("CUDA out of memory, rehearsed")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, context)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["out_of_memory", "worker_died"])
def test_the_failure_of_another_rank_is_that_of_the_group(launcher, tmp_path, kind):
    with pytest.raises(UnitError) as caught:
        launcher.train(replace(job(tmp_path, 4, 2, 2), task=Failing(kind)), ignore)
    assert caught.value.kind == kind
    limit = BatchLimit("training", 4) if kind == "out_of_memory" else None
    assert caught.value.limit == limit


@pytest.mark.slow
def test_a_warning_arrives_whatever_its_text_says(launcher, tmp_path):
    """A row with the key "started" says that the training has its resources; a text is no row."""
    asked = job(tmp_path / "started", 16, 1, 1)
    InlineLauncher().train(asked, ignore)
    newest = max((tmp_path / "started").rglob("state.pt"))
    newest.write_bytes(b"")
    told = []
    launcher.train(asked, told.append)
    (warning,) = (text for text in told if isinstance(text, str) and text.startswith("WARNING"))
    assert f"{newest.parent} is incomplete or corrupt" in warning


@pytest.mark.slow
def test_an_error_in_the_task_comes_with_its_text(launcher, tmp_path):
    class Broken(Regression):
        def loss(self, model, batch, context):
            print("before the error")
            raise ArithmeticError("this loss is broken")

    with pytest.raises(UnitError, match="this loss is broken") as caught:
        launcher.train(replace(job(tmp_path, 16, 1, 1), task=Broken()), ignore)
    assert (caught.value.kind, caught.value.trace.text.count('File "')) == ("error", 1)
    assert 'raise ArithmeticError("this loss is broken")' in caught.value.trace.text
    assert caught.value.trace.frame.endswith("in loss")
    assert (tmp_path / "logs" / "fit.log").read_text() == "before the error\n"
