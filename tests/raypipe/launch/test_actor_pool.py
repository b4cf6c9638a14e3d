"""Pools that keep their processes; what they share with other pools is in ``test_pool``."""

from __future__ import annotations

import os
import random
import signal
from functools import cache
from pathlib import Path

import psutil
import pytest
import ray

from raypipe import faults
from raypipe.graph.launcher import PoolOptions
from raypipe.launch.cluster import RayLauncher
from tests.raypipe.launch.test_beside import wait_until
from tests.raypipe.launch.test_pool import collect, square

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


def test_the_pool_ends_its_processes_when_it_is_interrupted(launcher, tmp_path):
    def interrupted() -> None:
        with launcher.pool(KEPT) as pool:
            pool.submit("x", predict, tmp_path)
            pids.extend(result.value[0] for result in collect(pool).values())
            pool.submit("y", signal.pause)
            raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    wait_until(lambda: not is_alive(pids[0]))
    with launcher.pool(PoolOptions(ray.cluster_resources()["CPU"])) as pool:  # all there is
        pool.submit("z", square, 3)
        assert collect(pool)["z"].value == 9


def test_a_process_that_died_between_tasks_is_replaced(launcher, tmp_path):
    with launcher.pool(KEPT) as pool:
        pool.submit("x", predict, tmp_path)
        [(pid, _)] = [result.value for result in collect(pool).values()]
        os.kill(pid, signal.SIGKILL)
        pool.submit("y", predict, tmp_path)
        told = [result for ended in iter(pool.finished, []) for result in ended]
    assert [(r.kind, r.retried) for r in told] == [("worker_died", True), (None, False)]
    assert told[-1].value[0] != pid


def test_rehearsed_deaths_are_tried_again_elsewhere(launcher, monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "kill_task:p=1")
    with launcher.pool(KEPT) as pool:
        for number in range(4):
            pool.submit(str(number), square, number)
        told = [result for ended in iter(pool.finished, []) for result in ended]
    died = {r.key for r in told if (r.kind, r.attempt, r.retried) == ("worker_died", 1, True)}
    assert died == {"0", "1", "2", "3"}
    values = {r.key: (r.value, r.attempt) for r in told if not r.retried}
    assert values == {str(number): (number**2, 2) for number in range(4)}


def test_a_share_of_its_own_is_refused(launcher: RayLauncher):
    with launcher.pool(KEPT) as pool:
        pool.submit("the pool's", square, 2, cpus=1)
        with pytest.raises(ValueError, match="keeps its processes; each has"):
            pool.submit("x", square, 2, cpus=0.25)
        assert collect(pool)["the pool's"].value == 4
