"""Work beside other work on one cluster: it gets its CPUs in turn, and all of it ends."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

import raypipe as rp
from raypipe.graph import launcher as launcher_module
from raypipe.graph.launcher import Control
from raypipe.graph.runner import GraphRunner
from raypipe.launch.cluster import RayLauncher
from raypipe.store.tables import read_table
from tests.raypipe.composed import composed, session_in
from tests.raypipe.examples.example_tasks import Regression
from tests.raypipe.launch.test_pool import cpus as cpus
from tests.raypipe.launch.test_pool import wait_until
from tests.raypipe.launch.test_train import ignore, job
from tests.raypipe.study.test_sweep import YAML, stages_of

WAIT_S = 400


@pytest.fixture
def control(launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch) -> Control:
    """The control of one test: an interrupt is for good."""
    for name, value in vars(Control()).items():
        monkeypatch.setattr(launcher, name, value)
    return launcher


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """The other thread."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


def test_a_training_that_waits_for_cpus_ends_when_it_is_interrupted(
    launcher, control, beside, cpus, tmp_path
):
    one = job(tmp_path / "run", 16, 1, 1, cpus_per_worker=cpus)
    with launcher.pool(rp.PoolOptions(1, keep_processes=True)) as pool:
        pool.submit("x", (tmp_path / "ran").touch)
        assert [result.error for result in pool.finished()] == [None]  # it holds its CPU
        waiting = beside.submit(launcher.train, one, ignore)
        wait_until(waiting.running)
        control.interrupt()
        with pytest.raises(KeyboardInterrupt):
            waiting.result(WAIT_S)
    assert not (tmp_path / "run" / "checkpoints").exists()
    wait_until(lambda: ray.available_resources().get("CPU", 0) == cpus)


def test_pools_start_nothing_while_a_training_waits_unless_something_else_holds_it_up(monkeypatch):
    clock, control = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), Control()
    monkeypatch.setattr(launcher_module, "time", clock)
    assert not control.holds_back("pool", 2)
    control.place("training", 1)
    held = [control.holds_back("pool", running) for running in (2, 1, 0)]
    clock.now = 10.0  # Ray would have started it
    held += [control.holds_back("pool", 0), control.holds_back("another", 1)]
    assert held == [True, True, True, False, False]
    control.ended("another training")  # there may be room now
    assert control.holds_back("pool", 1)
    control.placed("training")
    assert not control.holds_back("pool", 1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_training_of_all_cpus_starts_though_a_pool_is_full(
    workers, launcher, control, beside, cpus, tmp_path
):
    full, over, notes = threading.Event(), threading.Event(), tmp_path / "threads"

    class Threaded(Regression):  # here, so that its worker need not import this module
        def loss(self, model, batch, context):
            with notes.open("a") as file:
                file.write(f"{torch.get_num_threads()}\n")
            return super().loss(model, batch, context)

    def fill() -> None:
        with launcher.pool(rp.PoolOptions(1)) as pool:
            for number in range(4 * cpus):
                pool.submit(str(number), time.sleep, 0.05)
            while results := pool.finished():
                full.set()
                for result in [] if over.is_set() else results:
                    pool.submit(result.key, time.sleep, 0.05)

    filling = beside.submit(fill)
    try:
        assert full.wait(WAIT_S)
        share = cpus // workers
        one = job(tmp_path / "run", 16 // workers, 1, workers, cpus_per_worker=share)
        outcome = launcher.train(replace(one, task=Threaded()), ignore)
    finally:
        over.set()
    filling.result(WAIT_S)
    assert outcome["steps"] == 12
    assert outcome["leased"][1] > 0
    assert set(notes.read_text().split()) == {str(share)}  # it computes with the CPUs that it holds


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1], ids=["sweep", "training"])
def test_ctrl_c_ends_a_training_or_sweep_and_the_tasks_beside_it(
    launcher, control, beside, cpus, tmp_path, monkeypatch, stage
):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    run, trains, runs = rp.RunDirectory.at(tmp_path / "run"), tmp_path / "trains", tmp_path / "runs"
    text = YAML.replace("example_sweep", "tests.raypipe.launch.test_tune")
    text += f"notes: {trains}\npause_s: 0.1\n"
    long = ("sweep.steps=10000", "train.training.steps=10000", "train.scaling.cpus_per_worker=1")
    first = stages_of(*long, "train.scaling.gpus_per_worker=0", text=text)[stage]
    first = replace(first, on_gpu=True, alone=False)  # as on a GPU
    # its trials have the node to themselves, where there is no GPU
    begun = [trains] if first.name == "sweep" else [trains, runs]

    def note() -> None:
        """A task: a short one before a training, beside it one that has to be ended.

        The process that cancels a task at the moment of its end may abort (ray-project/ray#54527).
        """
        if is_beside := trains.exists():
            runs.touch()
        time.sleep(WAIT_S if is_beside else 0.05)

    def fill(context: rp.StageContext) -> None:
        with context.pool(rp.PoolOptions(1)) as pool:
            for number in range(4 * cpus):
                pool.submit(str(number), note)
            while ended := context.finished(pool):
                for result in ended:
                    pool.submit(result.key, note)

    def interrupt() -> None:
        try:
            wait_until(lambda: all(sign.exists() for sign in begun))
            time.sleep(0.2)  # the last short task
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    pressed = beside.submit(interrupt)
    stages = [first, *composed([rp.Stage("tasks", fill, [rp.Unit("tasks", {})])])]
    with pytest.raises(KeyboardInterrupt):
        GraphRunner(session_in(run.path(), launcher)).run(stages)
    pressed.result()
    found = read_table(run, "stages").set_index("stage")["status"]
    assert dict(found) == {first.name: "interrupted", "tasks": "interrupted"}
    assert not list(Path(run.location).glob(".ray*"))
    gc.collect()  # of Tune's actors nothing is left but a cycle of references
    wait_until(lambda: ray.available_resources().get("CPU", 0) == cpus)
