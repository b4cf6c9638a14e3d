"""Pools of tasks on Ray, of plain tasks and of processes that are kept."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from threadpoolctl import threadpool_info

from raypipe.graph.launcher import PoolOptions, TaskResult
from raypipe.launch import pool as pool_module
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.inline import InlineLauncher


@pytest.fixture(params=[False, True], ids=["tasks", "kept"])
def keep(request: pytest.FixtureRequest) -> bool:
    """Whether a pool keeps its processes."""
    return bool(request.param)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 400
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in 400 s"
        time.sleep(0.02)


def collect(pool) -> dict[str, TaskResult]:
    done: dict[str, TaskResult] = {}
    while ended := pool.finished():
        done |= {result.key: result for result in ended if not result.retried}
    return done


def square(x: int) -> int:
    return x * x


def fail(x: int) -> int:
    raise ValueError(f"no {x}")


@pytest.mark.parametrize("kind", ["ray", "inline"])
def test_results_come_under_their_keys_and_errors_as_results(kind, keep, request):
    place = request.getfixturevalue("launcher") if kind == "ray" else InlineLauncher()
    with place.pool(PoolOptions(0.5, keep_processes=keep)) as pool:
        for x in range(20):
            pool.submit(f"k{x}", fail if x == 7 else square, x)
        done = collect(pool)
    assert {key: r.value for key, r in done.items()} == {
        f"k{x}": None if x == 7 else x * x for x in range(20)
    }
    assert (done["k7"].kind, done["k7"].error) == ("error", "ValueError: no 7")
    assert all(result.worker for result in done.values())


def test_a_share_limits_the_threads(launcher: RayLauncher, keep):
    """Threads that wait do not spin for long."""

    def threads() -> list[int]:
        assert os.environ["GOMP_SPINCOUNT"] == "3000"
        np.ones((200, 200)) @ np.ones((200, 200))
        return [torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())]

    with launcher.pool(PoolOptions(0.25, keep_processes=keep)) as pool:
        for i in range(8):
            pool.submit(str(i), threads)
        for result in collect(pool).values():
            assert result.error is None
            assert set(result.value) == {1}


def test_shared_values_are_read_without_a_copy(launcher: RayLauncher, keep):
    def look(array: np.ndarray) -> tuple[bool, float]:
        return bool(array.flags.writeable), float(array.sum())

    with launcher.pool(PoolOptions(0.5, keep_processes=keep)) as pool:
        shared = pool.share(np.ones(10**6))
        pool.submit("a", look, shared)
        assert collect(pool)["a"].value == (False, 1e6)


def test_a_killed_task_is_tried_again_and_each_death_is_told(launcher, keep, tmp_path: Path):
    def die_once(marker: str) -> str:
        if not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    with launcher.pool(PoolOptions(0.5, keep_processes=keep)) as pool:
        pool.submit("x", die_once, str(tmp_path / "died"))
        told = []
        while ended := pool.finished():
            told += ended
    assert [(r.kind, r.attempt, r.retried, r.value) for r in told] == [
        ("worker_died", 1, True, None),
        (None, 2, False, "alive"),
    ]


def test_leaving_a_pool_ends_its_tasks(launcher, keep, tmp_path: Path):
    def slow(folder: str) -> None:
        Path(folder, "started").touch()
        while not Path(folder, "left").exists():
            time.sleep(0.01)
        Path(folder, "survived").touch()

    with launcher.pool(PoolOptions(0.5, keep_processes=keep)) as pool:
        pool.submit("fast", square, 3)
        assert pool.finished()[0].key == "fast"
        pool.submit("slow", slow, str(tmp_path))
        while not (tmp_path / "started").exists():
            time.sleep(0.05)
    time.sleep(2)
    (tmp_path / "left").touch()
    time.sleep(2)
    assert not (tmp_path / "survived").exists()


@pytest.fixture
def cpus() -> int:
    return int(ray.cluster_resources()["CPU"])


def test_tasks_of_different_shares_fill_the_cpus(launcher, cpus, tmp_path: Path):
    def meet(name: str, number: int) -> bool:
        (tmp_path / name).touch()
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < number:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    with launcher.pool(PoolOptions(1)) as pool:  # one whole CPU, the others in quarters
        shares = [1.0, *[0.25] * 4 * (cpus - 1)]
        for i, share in enumerate(shares):
            pool.submit(str(i), meet, str(i), len(shares), cpus=share)
        assert all(result.value for result in collect(pool).values())
        with pytest.raises(ValueError, match="at most 1"):
            pool.submit("too much", square, 1, cpus=2)


def test_who_submits_while_there_is_room_has_little_in_flight(launcher, keep, cpus):
    with launcher.pool(PoolOptions(0.5, keep_processes=keep)) as pool:
        waiting, most, done = 200, 0, 0
        in_flight = 0
        while waiting or in_flight:
            while waiting and pool.has_room:
                pool.submit(str(waiting), square, waiting)
                waiting, in_flight = waiting - 1, in_flight + 1
            most = max(most, in_flight)
            ended = len(pool.finished())
            done, in_flight = done + ended, in_flight - ended
    assert done == 200
    assert 2 * cpus <= most <= 3 * cpus


def test_a_task_beyond_its_time_is_tried_again_and_given_up(launcher, keep, tmp_path: Path):
    def hang_once(marker: str) -> str:
        if not Path(marker).exists():
            Path(marker).touch()
            ctypes.PyDLL(None).sleep(60)  # holds the interpreter, as a hanging library does
        return "in time"

    options = PoolOptions(0.5, time_limit_s=2, attempts=2, keep_processes=keep)
    with launcher.pool(options) as pool:
        pool.submit("once", hang_once, str(tmp_path / "hung"))
        pool.submit("always", time.sleep, 60)
        pool.submit("quick", square, 3)
        told: dict[str, list[tuple[str | None, bool, object]]] = defaultdict(list)
        while ended := pool.finished():
            for result in ended:
                told[result.key].append((result.kind, result.retried, result.value))
                assert result.kind is None or "its limit of 2 s" in result.error
    assert told == {
        "once": [("timeout", True, None), (None, False, "in time")],
        "always": [("timeout", True, None), ("timeout", False, None)],
        "quick": [(None, False, 9)],
    }


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_tasks_at_a_time_than_asked_for(launcher: RayLauncher, tmp_path, keep, most):
    def mark(number: int) -> int:
        here = tmp_path / f"{number}"
        here.touch()
        time.sleep(0.1)
        together = len(list(tmp_path.iterdir()))
        here.unlink()
        return together

    options = PoolOptions(0.25, keep_processes=keep, most_tasks=most)
    with launcher.pool(options) as pool:
        assert pool.capacity == 0.25 * most
        for number in range(8):
            pool.submit(f"{number}", mark, number)
        assert max(result.value for result in collect(pool).values()) <= most


def test_nodes_that_come_and_go_count(launcher: RayLauncher, keep, monkeypatch):
    nodes = [1]
    monkeypatch.setattr(pool_module, "_MEASURE_S", 0)
    monkeypatch.setattr(pool_module, "room", lambda *_: nodes[0])
    with launcher.pool(PoolOptions(1, keep_processes=keep)) as pool:
        assert pool.capacity == 1
        nodes[0] = 5
        assert pool.has_room
        assert pool.capacity == 5
        nodes[0] = 0  # one task waits for the next node
        assert pool.has_room
        assert pool.capacity == 1


KEPT = PoolOptions(1, keep_processes=True)


@cache
def model(folder: Path) -> float:
    """What takes long to load: the note that it was, and a number of this process's own."""
    (folder / f"{os.getpid()}-{len(list(folder.iterdir()))}").touch()
    return random.SystemRandom().random()


def predict(folder: Path) -> tuple[int, float]:
    return os.getpid(), model(folder)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_what_a_task_loads_the_next_one_finds_until_the_pool_ends(launcher, tmp_path):
    cpus = ray.cluster_resources()["CPU"]
    pids: list[set[int]] = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        with launcher.pool(KEPT) as pool:
            for number in range(20):
                pool.submit(str(number), predict, folder)
            seen = {result.value for result in collect(pool).values()}
            pool.submit("later", predict, folder)
            seen |= {result.value for result in collect(pool).values()}
            pids.append({pid for pid, _ in seen})
            assert all(map(is_alive, pids[-1]))
        assert len(seen) == len(pids[-1]) == len(list(folder.iterdir())) <= cpus
        wait_until(lambda: not any(map(is_alive, pids[-1])))
    assert not pids[0] & pids[1]
    wait_until(lambda: ray.available_resources().get("CPU", 0) == cpus)


def test_a_process_that_died_between_tasks_is_replaced(launcher, tmp_path):
    with launcher.pool(KEPT) as pool:
        pool.submit("x", predict, tmp_path)
        [(pid, _)] = [result.value for result in collect(pool).values()]
        os.kill(pid, signal.SIGKILL)
        pool.submit("y", predict, tmp_path)
        told = [result for ended in iter(pool.finished, []) for result in ended]
    assert [(r.kind, r.retried) for r in told] == [("worker_died", True), (None, False)]
    assert told[-1].value[0] != pid


def test_a_share_of_its_own_is_refused(launcher: RayLauncher):
    with launcher.pool(KEPT) as pool:
        pool.submit("the pool's", square, 2, cpus=1)
        with pytest.raises(ValueError, match="each of its processes has 1"):
            pool.submit("x", square, 2, cpus=0.25)
        assert collect(pool)["the pool's"].value == 4
