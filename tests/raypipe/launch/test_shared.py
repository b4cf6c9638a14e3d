"""CPU tasks beside trainings and trials on one cluster: who gets the CPUs, and how all end."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from raypipe.launch.capacity import Shared, of_a_group
from raypipe.launch.cluster import RayLauncher
from raypipe.pipeline.context import Session, StageContext
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.launcher import PoolOptions
from raypipe.pipeline.progress import Display
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import read_table
from raypipe.tracking import Target, Trackers
from raypipe.training.settings import LoaderSettings, ScalingSettings, TrainStageSettings
from tests.raypipe.composed import run_stages
from tests.raypipe.launch.test_train import Regression, ignore, job
from tests.raypipe.pipeline.test_scheduler import GPU_NODE
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
def shared(launcher: RayLauncher, monkeypatch: pytest.MonkeyPatch) -> Shared:
    """What is shared in one test: an interruption is for good."""
    fresh = Shared()
    monkeypatch.setattr(launcher, "_shared", fresh)
    return fresh


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
def test_tasks_leave_the_cpus_that_are_held(keep, launcher, shared, beside, cpus, tmp_path):
    beside.submit(shared.hold, "training", cpus - 1).result()
    with launcher.pool(PoolOptions(1, keep_processes=keep)) as pool:
        for number in range(12):
            pool.submit(str(number), timed, number)
        spans: list[tuple[float, float]] = []
        while len(spans) < 8:
            spans += [result.value for result in pool.finished()]
        assert at_once(spans) == 1
        beside.submit(shared.release, "training").result()
        while pool.finished():
            pass
        for number in range(cpus):  # they end when all of them run
            pool.submit(f"all {number}", meet, tmp_path, str(number), cpus)
        errors = []
        while ended := pool.finished():
            errors += [result.error for result in ended]
    assert errors == [None] * cpus


@pytest.mark.parametrize("keep", [False, True])
def test_tasks_wait_while_everything_is_held(keep, launcher, shared, beside, cpus, tmp_path):
    beside.submit(shared.hold, "training", cpus).result()
    with launcher.pool(PoolOptions(1, keep_processes=keep)) as pool, ThreadPoolExecutor(1) as third:
        pool.submit("x", meet, tmp_path, "began", 1)
        third.submit(time.sleep, 1.2).add_done_callback(
            lambda _: beside.submit(
                lambda: ((tmp_path / "released").touch(), shared.release("training"))
            )
        )
        [result] = pool.finished()
        assert result.error is None
        assert (tmp_path / "released").stat().st_mtime_ns <= (
            (tmp_path / "began").stat().st_mtime_ns
        )
        assert pool.finished() == []


def test_who_holds_cpus_waits_for_tasks_and_holders_but_not_for_itself(cpus, shared, beside):
    shared.use("pool", cpus)
    assert shared.hold("training", cpus)  # the same thread
    assert not beside.submit(shared.hold, "another", 1).result()
    assert shared.left() == cpus - 1
    shared.release("training")
    assert not beside.submit(shared.hold, "another", 1).result()
    shared.use("pool", cpus - 1)
    assert beside.submit(shared.hold, "another", 1).result()
    beside.submit(shared.release, "another").result()
    assert shared.left() is None


def test_a_thread_that_waits_for_cpus_ends_when_it_is_interrupted(cpus, shared, beside):
    told: list[str] = []
    shared.use("pool", cpus)
    waiting = beside.submit(lambda: shared.held(1, told.append).__enter__())
    wait_until(lambda: bool(told))
    shared.interrupt()
    with pytest.raises(KeyboardInterrupt):
        waiting.result(WAIT_S)
    assert "waits for 1 CPU" in told[0]
    assert shared.left() is None


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_a_training_of_all_cpus_starts_though_a_pool_is_full(
    keep, launcher, shared, beside, cpus, tmp_path
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
    assert shared.left() is None


def test_an_elastic_group_holds_what_there_is_room_for(launcher, cpus, tmp_path):
    def held(workers, each: float, processes) -> float:
        settings = TrainStageSettings(
            scaling=ScalingSettings(workers=workers, cpus_per_worker=each),
            loader=LoaderSettings(workers=processes),
        )
        return of_a_group(replace(job(tmp_path, 1, 1, 1), settings=settings))

    assert held((1, 64), 1, None) == cpus
    assert held(1, 1, 1) == 2
    assert held(3 * cpus, 1, "auto") == 3 * cpus


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
def test_ctrl_c_ends_what_runs_on_gpus_and_the_tasks_beside_it(
    launcher, shared, cpus, tmp_path, monkeypatch, kind
):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    run, signs = RunDirectory.at(tmp_path / "run"), tmp_path / "signs"
    signs.mkdir()
    none = Trackers((), Target(run, "r", "lanes", {}))
    session = Session(run, "r", Ledger(run), launcher, Display(), [GPU_NODE], none)
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

    first, sign = Stage("first", train, [Unit("first", {})], on_gpu=True), signs / "steps"
    if kind == "sweep":  # its trials take the CPU, where there is no GPU
        sign = signs / "trial"
        text = YAML.replace("example_sweep", "tests.raypipe.launch.test_tune")
        text += f"notes: {sign}\npause_s: 0.1\n"
        [first, _] = stages_of("train.scaling.gpus_per_worker=0", "sweep.steps=10000", text=text)
        first = replace(first, name="first", on_gpu=True)

    def interrupt() -> None:
        try:
            wait_until(lambda: sign.exists() and (signs / "task").exists())
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
    assert shared.left() is None
    assert not list(Path(run.location).glob(".ray*"))
    gc.collect()  # of Tune's actors nothing is left but a cycle of references
    wait_until(lambda: ray.available_resources().get("CPU", 0) == cpus)
