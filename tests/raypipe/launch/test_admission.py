"""Concurrent stages on one cluster: who gets the CPUs and GPUs, and how all of them end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from raypipe.errors import UnitError
from raypipe.integrations.tracking import Target, Trackers
from raypipe.launch.admission import Admission
from raypipe.launch.capacity import claim_of
from raypipe.launch.cluster import RayLauncher
from raypipe.pipeline.allocator import Claim, Lease
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.launcher import PoolOptions
from raypipe.pipeline.progress import Display
from raypipe.pipeline.session import Session
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import read_table
from raypipe.training.settings import LoaderSettings, ScalingSettings, TrainStageSettings
from tests.raypipe.composed import run_stages
from tests.raypipe.launch.test_train import Regression, ignore, job, outcome
from tests.raypipe.pipeline.test_scheduler import CPU_NODE
from tests.raypipe.sweep.test_sweep import YAML, stages_of

WAIT_S = 400


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen in {WAIT_S} s"
        time.sleep(0.02)


def meet(folder: Path, name: str, number: int) -> None:
    """A task that ends when so many have begun."""
    (folder / name).touch()
    wait_until(lambda: len(list(folder.iterdir())) >= number)


def timed(_: int) -> tuple[float, float]:
    began = time.monotonic()
    time.sleep(0.05)
    return began, time.monotonic()


def at_once(spans: list[tuple[float, float]]) -> int:
    """The most that ran at the same time."""
    return max(sum(began <= start < ended for began, ended in spans) for start, _ in spans)


@pytest.fixture
def admission(launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch) -> Admission:
    """The admission of one test: an interrupt is for good."""
    fresh = Admission()
    monkeypatch.setattr(launcher, "_admission", fresh)
    return fresh


def held(admission: Admission, cpus: float, rank: float = 0.0) -> Lease:
    """A lease that is granted."""
    lease = admission.request(Claim({"CPU": cpus}), rank)
    assert admission.is_granted(lease)
    return lease


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """The other thread."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def cpus(launcher: RayLauncher) -> int:
    number = int(ray.cluster_resources()["CPU"])
    if number < 2:
        pytest.skip("needs two CPUs")
    return number


@pytest.mark.parametrize("keep", [False, True])
def test_tasks_leave_the_cpus_that_are_held(keep, launcher, admission, cpus, tmp_path):
    training = held(admission, cpus - 1)
    with launcher.pool(PoolOptions(1, keep_processes=keep)) as pool:
        for number in range(12):
            pool.submit(str(number), timed, number)
        spans: list[tuple[float, float]] = []
        while len(spans) < 8:
            spans += [result.value for result in pool.finished()]
        assert at_once(spans) == 1
        admission.release(training)
        while pool.finished():
            pass
        for number in range(cpus):  # they end when all of them run
            pool.submit(f"all {number}", meet, tmp_path, str(number), cpus)
        errors = []
        while ended := pool.finished():
            errors += [result.error for result in ended]
    assert errors == [None] * cpus


@pytest.mark.parametrize("keep", [False, True])
def test_tasks_wait_while_everything_is_held(keep, launcher, admission, beside, cpus, tmp_path):
    training = held(admission, cpus)

    def release() -> None:
        time.sleep(1.2)
        (tmp_path / "released").touch()
        admission.release(training)

    with launcher.pool(PoolOptions(1, keep_processes=keep)) as pool:
        pool.submit("x", meet, tmp_path, "began", 1)
        beside.submit(release)
        [result] = pool.finished()
        assert result.error is None
        assert (tmp_path / "released").stat().st_mtime_ns <= (
            (tmp_path / "began").stat().st_mtime_ns
        )
        assert pool.finished() == []


def test_a_claim_waits_for_the_tasks_of_pools_and_for_other_leases(cpus, admission):
    pool = admission.request(Claim({"CPU": 1.0}, pool=True))
    assert admission.is_granted(pool)
    admission.use(pool, cpus, 10.0)
    training = admission.request(Claim({"CPU": 1.0}))
    assert not admission.is_granted(training)
    assert admission.share(pool) == cpus - 1
    admission.use(pool, cpus - 1, 10.0)
    assert training.granted
    another = admission.request(Claim({"CPU": float(cpus)}))
    admission.release(training)
    assert not another.granted
    assert admission.share(pool) == 0.0
    admission.use(pool, 0.0, 10.0)
    assert another.granted
    admission.release(another)
    assert admission.share(pool) == cpus


def test_a_thread_that_waits_for_cpus_ends_when_it_is_interrupted(cpus, admission, beside):
    held(admission, cpus)
    lease = admission.lease(Claim({"CPU": 1.0}), 0.0, int)
    waiting = beside.submit(lease.__enter__)
    wait_until(waiting.running)
    admission.interrupt()
    with pytest.raises(KeyboardInterrupt):
        waiting.result(WAIT_S)


def test_a_claim_that_lost_its_nodes_waits_for_them_or_raises(cpus, admission, beside):
    """``await_room`` decides; here it gives up."""
    training = held(admission, cpus)

    def gone() -> None:
        raise UnitError("t", "node_lost", "no node is left")

    def wait() -> None:
        with admission.lease(Claim({"CPU": cpus + 1.0}), 0.0, gone):
            pytest.fail("it has no room")

    with pytest.raises(UnitError, match="no node is left"):
        beside.submit(wait).result(WAIT_S)
    admission.release(training)
    held(admission, cpus)


def test_a_lone_training_computes_on_all_cpus(launcher, admission, cpus, tmp_path):
    """And on its own when others come."""
    lease = held(admission, 1.0)
    assert admission.threads(lease) == cpus
    others = [held(admission, 1.0) for _ in range(cpus - 1)]
    assert admission.threads(lease) == 1
    admission.release(others[0])
    assert admission.threads(lease) == 1 + 1 // (cpus - 1)
    for other in [lease, *others[1:]]:
        admission.release(other)
    one = job(tmp_path / "run", 16, 1, 1)
    one = replace(one, task=Threaded(tmp_path / "threads"))
    assert launcher.train(one, ignore)["steps"] == 12
    assert {int(line) for line in (tmp_path / "threads").read_text().split()} == {cpus}


class Threaded(Regression):
    """Notes the number of threads of each step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def loss(self, model, batch, context):
        with self.path.open("a") as notes:
            notes.write(f"{torch.get_num_threads()}\n")
        return super().loss(model, batch, context)


def test_trainings_in_sequence_share_their_processes(launcher, admission, cpus, tmp_path):
    """And compute what a training alone computes."""
    others = held(admission, cpus - 1.0)
    jobs = [
        replace(job(tmp_path / name, 16, 1, 1), task=Process(tmp_path / f"{name}.pid"))
        for name in "abc"
    ]
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(launcher.train, each, ignore) for each in jobs]
        assert [each.result(WAIT_S)["steps"] for each in waiting] == [12] * 3
    admission.release(others)
    assert len({(tmp_path / f"{name}.pid").read_text() for name in "abc"}) == 1
    expected, weights = outcome(jobs[0])
    for each in jobs[1:]:
        losses, found = outcome(each)
        assert losses.tolist() == expected.tolist()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert not [path for path in tmp_path.rglob(".ray-*") if any(path.iterdir())]


class Process(Regression):
    """Notes its process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def loss(self, model, batch, context):
        self.path.write_text(str(os.getpid()))
        return super().loss(model, batch, context)


def test_processes_of_a_training_end_if_something_else_comes_next(admission, cpus):
    class Ends:
        ended = 0

        def close(self) -> None:
            self.ended += 1

    first, processes = held(admission, float(cpus)), Ends()
    assert not admission.hand_over(first, processes)
    small = admission.request(Claim({"CPU": 1.0}), 9.0)
    same = admission.request(Claim({"CPU": float(cpus)}), 1.0)
    assert not admission.hand_over(first, processes)
    admission.release(small)
    assert admission.hand_over(first, processes)
    assert admission.is_granted(same)
    admission.release(first)
    assert processes.ended == 0
    admission.release(same)  # its thread was interrupted before it took them
    assert processes.ended == 1
    assert admission.inherited(same) is None


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_a_training_of_all_cpus_starts_though_a_pool_is_full(
    keep, launcher, admission, beside, cpus, tmp_path
):
    full, over = threading.Event(), threading.Event()

    def fill() -> int:
        ended = 0
        with launcher.pool(PoolOptions(1, keep_processes=keep)) as pool:
            for number in range(4 * cpus):
                pool.submit(str(number), time.sleep, 0.05)
            while results := pool.finished():
                ended += len(results)
                full.set()
                for number in range(0 if over.is_set() else len(results)):
                    pool.submit(f"{ended}-{number}", time.sleep, 0.05)
        return ended

    filling: Future[int] = beside.submit(fill)
    try:
        assert full.wait(WAIT_S)
        one = job(tmp_path / "run", 16, 1, 1)
        scaling = ScalingSettings(cpus_per_worker=cpus)
        one = replace(one, settings=one.settings.model_copy(update={"scaling": scaling}))
        assert launcher.train(one, ignore)["steps"] == 12
    finally:
        over.set()
    assert filling.result(WAIT_S) >= 4 * cpus
    held(admission, cpus)


def test_an_elastic_group_holds_what_there_is_room_for(launcher, cpus, tmp_path):
    def cpus_of(workers, each: float, processes) -> float:
        settings = TrainStageSettings(
            scaling=ScalingSettings(workers=workers, cpus_per_worker=each),
            loader=LoaderSettings(workers=processes),
        )
        claim = claim_of(replace(job(tmp_path, 1, 1, 1), settings=settings))
        return claim.fewest * claim.bundle["CPU"]

    assert cpus_of((1, 64), 1, 0) == cpus
    assert cpus_of(1, 1, 1) == 2
    assert cpus_of(3 * cpus, 1, 0) == 3 * cpus


class Beside(Regression):
    """Trains for long, once a task has begun after it did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def loss(self, model, batch, context):
        (self.folder / "training").touch()
        wait_until((self.folder / "task").exists)
        time.sleep(0.1)
        return super().loss(model, batch, context)


def note(folder: Path) -> None:
    """A task: a short one before a training, beside it one that has to be ended.

    The process that cancels a task at the moment of its end may abort (ray-project/ray#54527).
    """
    if beside := any((folder / name).exists() for name in ("training", "trial")):
        (folder / "task").touch()
    time.sleep(WAIT_S if beside else 0.05)


@pytest.mark.parametrize("kind", ["training", pytest.param("sweep", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_training_or_sweep_and_the_tasks_beside_it(
    launcher, admission, cpus, tmp_path, monkeypatch, kind
):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    run, signs = RunDirectory.at(tmp_path / "run"), tmp_path / "signs"
    signs.mkdir()
    none = Trackers((), Target(run, "r", "both", {}))
    session = Session(run, "r", Ledger(run), launcher, Display(), [CPU_NODE], none)
    long = replace(job(tmp_path / "run", 16, 1, 1, steps=10_000), task=Beside(signs))

    def fill(context: StageContext) -> None:
        with context.pool(PoolOptions(1)) as pool:
            for number in range(4 * cpus):
                pool.submit(str(number), note, signs)
            while ended := context.finished(pool):
                for result in ended:
                    pool.submit(result.key, note, signs)

    def train(context: StageContext) -> None:
        launcher.train(long, lambda told: (signs / "steps").touch())

    first = Stage("first", train, [Unit("first", {})], on_gpu=True)
    begun = [signs / "steps", signs / "task"]
    if kind == "sweep":  # its trials have the node to themselves, where there is no GPU
        begun = [signs / "trial"]
        text = YAML.replace("example_sweep", "tests.raypipe.launch.test_tune")
        text += f"notes: {begun[0]}\npause_s: 0.1\n"
        [first, _] = stages_of("train.scaling.gpus_per_worker=0", "sweep.steps=10000", text=text)
        first = replace(first, name="first", on_gpu=True)

    def interrupt() -> None:
        try:
            wait_until(lambda: all(sign.exists() for sign in begun))
            time.sleep(0.2)  # the last short task
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presser = threading.Thread(target=interrupt)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_stages([first, Stage("second", fill, [Unit("second", {})])], session)
    finally:
        presser.join()
        signal.signal(signal.SIGINT, before)
    found = read_table(run, "stages").set_index("stage")["status"]
    assert dict(found) == {"first": "interrupted", "second": "interrupted"}
    held(admission, cpus)
    assert not list(Path(run.location).glob(".ray*"))
    gc.collect()  # of Tune's actors nothing is left but a cycle of references
    wait_until(lambda: ray.available_resources().get("CPU", 0) == cpus)
