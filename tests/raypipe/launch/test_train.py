"""Trainings on Ray Train and in this process: what one computes, any group computes; their logs."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raypipe.errors import BatchLimit, UnitError
from raypipe.faults import VARIABLE
from raypipe.launch.inline import InlineLauncher
from raypipe.launch.training import logged
from raypipe.store.run_directory import RunDirectory
from raypipe.training.job import TrainingJob
from raypipe.training.recovery import train_to_the_end
from raypipe.training.settings import LoaderSettings
from tests.command import in_child, until
from tests.raypipe.examples import example_tasks
from tests.raypipe.examples.example_tasks import Regression, assert_close, assert_equal, outcome

#: losses and weights
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def job(
    folder: Path, micro: int, accumulation: int, workers: int, steps: int = 12, **scaling: Any
) -> TrainingJob:
    given = {"steps": steps, "checkpoint_every": 4, "seed": 3}
    made = example_tasks.job(Regression(), folder, (micro, accumulation, 16, workers), **given)
    return replace(made, settings=made.settings.changed("scaling", **scaling))


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


@pytest.fixture
def inline() -> InlineLauncher:
    return InlineLauncher()


def test_several_workers_in_this_process_are_one_with_the_same_model(inline, tmp_path):
    stored = []
    for plan in ((8, 2, 16, 1), (8, 1, 16, 2)):
        folder, loader = tmp_path / str(plan), LoaderSettings(workers=1)
        asked = example_tasks.job(Regression(), folder, plan, loader=loader)
        assert inline.train(asked, ignore)["workers"] == 1
        stored.append(example_tasks.weights(asked))
    assert_equal(*stored)


def test_a_resumed_training_says_from_which_step(inline, tmp_path):
    whole = job(tmp_path, 16, 1, 1)
    said: list[str] = []
    inline.train(replace(whole, until=4), ignore)
    inline.train(whole, lambda row: said.append(row) if isinstance(row, str) else None)
    assert said == ["continues from step 4 of 12 (checkpoint)"]


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["out_of_memory", "worker_died"])
def test_the_failure_of_another_rank_is_that_of_the_group(launcher, tmp_path, kind):
    class Failing(Regression):
        """Rank 1 fails; rank 0 waits for its gradients, and does not by itself."""

        def loss(self, model, batch, context):
            if dist.get_rank() == 1 and context.step == 3:
                if kind == "out_of_memory":
                    raise torch.OutOfMemoryError("CUDA out of memory, rehearsed")
                os.kill(os.getpid(), signal.SIGKILL)
            return super().loss(model, batch, context)

    with pytest.raises(UnitError) as caught:
        launcher.train(replace(job(tmp_path, 4, 2, 2), task=Failing()), ignore)
    assert caught.value.kind == kind
    limit = BatchLimit("training", 4) if kind == "out_of_memory" else None
    assert caught.value.limit == limit


@pytest.mark.parametrize("place", ["inline", pytest.param("launcher", marks=pytest.mark.slow)])
def test_an_error_in_the_task_comes_with_its_text_and_place(place, request, tmp_path):
    class Broken(Regression):
        def loss(self, model, batch, context):
            print("before the error")
            raise ArithmeticError("this loss is broken")

    broken = replace(job(tmp_path, 16, 1, 1), task=Broken())
    with pytest.raises(UnitError, match="this loss is broken") as caught:
        request.getfixturevalue(place).train(broken, ignore)
    assert (caught.value.kind, caught.value.trace.text.count('File "')) == ("error", 1)
    assert 'raise ArithmeticError("this loss is broken")' in caught.value.trace.text
    assert caught.value.trace.frame.endswith("in loss")
    if place == "launcher":
        assert (tmp_path / "logs" / "fit.log").read_text() == "before the error\n"


@pytest.mark.parametrize("place", ["run", "remote"])
def test_a_training_worker_writes_what_it_prints_to_its_log(place, request, tmp_path):
    where: RunDirectory = request.getfixturevalue(place)
    loud = replace(job(tmp_path, 16, 1, 1), run_dir=where)

    def train() -> None:
        with logged(loud, rank=0):
            os.write(1, b"first\n")
            os.system("echo child s3://key:secret@bucket")
        with logged(loud, rank=0):
            os.write(2, b"second\n")
            outliving = subprocess.Popen(["sleep", "600"])  # as those of a compiler
        with logged(loud, rank=0):
            os.write(1, b"third\nat https://me:secret@host")
        outliving.kill()
        with logged(loud, rank=1):
            pass

    assert in_child(train) == 0
    text = where.read(where.log("fit")).decode()
    lines = ["first", "child s3://***@bucket", "second", "third", "at https://***@host"]
    assert text.splitlines() == lines
    assert where.list(where.logs) == ["fit.log"]  # nothing for the silent worker


def test_a_log_holds_no_credentials_even_if_its_worker_is_killed(run, tmp_path):
    def die() -> None:
        with logged(replace(job(tmp_path, 16, 1, 1), run_dir=run), rank=0):
            os.write(1, b"s3://key:secret@bucket\nlast words")
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL
    until(lambda: run.read(run.log("fit")).endswith(b"words"), "all is copied")
    assert run.read(run.log("fit")) == b"s3://***@bucket\nlast words"
