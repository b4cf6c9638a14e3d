"""Pools of tasks: on Ray, of plain tasks and of processes that are kept, and in this process."""

from __future__ import annotations

import bdb
import ctypes
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle
from threadpoolctl import threadpool_info

from raypipe.graph.launcher import PoolOptions, TaskResult
from raypipe.launch import pool as pool_module
from raypipe.launch import task
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.inline import InlineLauncher
from tests.command import in_child, is_alive, until


@pytest.fixture(scope="module", autouse=True)
def _sent_by_value() -> Iterator[None]:
    """Workers that run the functions of this module need not import it, and with it torch."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["tasks", "kept"])
def keep(request: pytest.FixtureRequest) -> bool:
    """Whether a pool keeps its processes, each of which costs seconds."""
    return bool(request.param)


def wait_until(happened: Callable[[], bool]) -> None:
    until(happened, "it happened", 400)


def collect(pool) -> dict[str, list[TaskResult]]:
    """The attempts of each task."""
    done: dict[str, list[TaskResult]] = {}
    for ended in iter(pool.finished, []):
        for result in ended:
            done.setdefault(result.key, []).append(result)
    return done


def threads() -> set[int]:
    """Those of the libraries, which do not spin for long while they wait."""
    assert os.environ["GOMP_SPINCOUNT"] == "3000"
    np.ones((200, 200)) @ np.ones((200, 200))
    return {torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())}


def look(array: np.ndarray) -> tuple[bool, float]:
    return bool(array.flags.writeable), float(array.sum())


def speak() -> str:
    print("hello")
    print("to stderr", file=sys.stderr)
    os.system("echo from a child")
    return "spoken"


def shout() -> None:
    print("begin" + "x" * 10**6 + "end")
    raise ValueError("too loud")


def stop_here() -> None:
    breakpoint()


def die(words: str = "last words") -> None:
    os.write(1, f"{words}\n".encode())  # as a library in C does
    os.kill(os.getpid(), signal.SIGKILL)


def hang(marker: Path) -> str:
    """Hang, but for the second time."""
    print("waiting", flush=True)
    if not marker.exists():
        marker.touch()
        ctypes.PyDLL(None).sleep(60)  # holds the interpreter, as a hanging library does
    return "in time"


#: by key: the task, and the kind of failure, the value or a part of the error, and a part of the
#: output of each of its attempts; ``marker`` is a path where nothing is yet
TASKS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[tuple[Any, Any, str]]]] = {
    "threads": (threads, (), [(None, {1}, "")]),
    "shared": (look, ("shared",), [(None, (False, 1e6), "")]),
    "loud": (speak, (), [(None, "spoken", "from a child\n")]),
    "long": (shout, (), [("error", "ValueError: too loud", "xend\n")]),
    "debugger": (stop_here, (), [("error", "use `raypipe run --local`", "")]),
    "unsendable": (threading.Lock, (), [("error", "lock", "")]),
    "dies": (die, (), [("worker_died", "", "last words\n")] * 2),
    "hangs once": (
        hang,
        ("marker",),
        [("timeout", "its limit of 4 s", "in hang"), (None, "in time", "waiting\n")],
    ),
}


def test_each_attempt_of_a_task_is_a_result_with_what_it_printed(launcher, keep, tmp_path: Path):
    options = PoolOptions(0.5, time_limit_s=4, attempts=2, keep_processes=keep)
    with launcher.pool(options) as pool:
        made = {"shared": pool.share(np.ones(10**6)), "marker": tmp_path / "marker"}
        for key, (function, arguments, _) in TASKS.items():
            pool.submit(key, function, *(made.get(word, word) for word in arguments))
        done = collect(pool)
    for key, (_, _, expected) in TASKS.items():
        assert [r.kind for r in done[key]] == [kind for kind, _, _ in expected], key
        assert [r.attempt for r in done[key]] == list(range(1, len(expected) + 1))
        assert [r.retried for r in done[key]] == [*[True] * (len(expected) - 1), False]
        for result, (kind, value, output) in zip(done[key], expected, strict=True):
            assert result.value == value if kind is None else value in result.error, key
            assert output in result.output, key
            assert result.worker or kind in ("worker_died", "timeout", "error")
    (loud,), (long,), (unsendable,) = done["loud"], done["long"], done["unsendable"]
    assert set(loud.output.split("\n")) == {"from a child", "hello", "to stderr", ""}
    assert "waiting\nTimeout" in done["hangs once"][0].output
    assert long.output.startswith("beginx")
    assert len(long.output) < 70_000
    assert done["debugger"][0].trace.frame.endswith("in stop_here")
    assert "\x1b" not in unsendable.trace.text


def test_the_output_of_another_task_of_the_same_key_is_not_taken(tmp_path, monkeypatch):
    """As of two commands on one cluster, whose tasks died."""
    monkeypatch.setattr(task, "_folder", lambda: tmp_path)
    for name in ("one", "two"):
        in_child(task.run_in_worker, name, 1, None, 1.0, [("unit", 1, die, (f"words of {name}",))])
    found = [task.take_remains(name)[2] for name in ("three", "two", "one", "one")]
    assert found == ["", "words of two\n", "words of one\n", ""]


def test_in_this_process_a_task_has_no_time_limit_and_a_debugger_ends_it(capsys):
    def quit_debugger() -> None:
        raise bdb.BdbQuit

    with InlineLauncher().pool(PoolOptions(time_limit_s=0.01)) as pool:
        pool.submit("slow", time.sleep, 0.05)
        assert collect(pool)["slow"][0].error is None
        pool.submit("debugged", quit_debugger)
        with pytest.raises(bdb.BdbQuit):
            pool.finished()
    assert "local: not followed: the time limit of 0.01 s" in capsys.readouterr().out


def test_leaving_a_pool_ends_its_tasks(launcher, keep, tmp_path: Path):
    beat = tmp_path / "beat"

    def slow() -> None:
        while True:
            beat.touch()
            time.sleep(0.01)

    with launcher.pool(PoolOptions(0.5, keep_processes=keep)) as pool:
        pool.submit("fast", pow, 3, 2)
        assert pool.finished()[0].key == "fast"
        pool.submit("slow", slow)
        wait_until(beat.exists)
    wait_until(lambda: time.time() > beat.stat().st_mtime + 1)


@pytest.fixture
def cpus(launcher: RayLauncher) -> int:
    number = int(ray.cluster_resources()["CPU"])
    if number < 2:
        pytest.skip("needs two CPUs")
    return number


@pytest.mark.slow
def test_tasks_of_different_shares_fill_the_cpus(launcher, cpus, tmp_path: Path):
    def meet(name: str, number: int) -> None:
        (tmp_path / name).touch()
        until(lambda: len(list(tmp_path.iterdir())) >= number, "all run at the same time")

    with launcher.pool(PoolOptions(1)) as pool:  # one whole CPU, the others in quarters
        shares = [1.0, *[0.25] * 4 * (cpus - 1)]
        for i, share in enumerate(shares):
            pool.submit(str(i), meet, str(i), len(shares), cpus=share)
        assert [result.error for (result,) in collect(pool).values()] == [None] * len(shares)


def test_who_submits_while_there_is_room_has_little_in_flight(launcher, keep, cpus):
    with launcher.pool(PoolOptions(0.5, keep_processes=keep)) as pool:
        submitted, done, most = 0, 0, 0
        while done < 6 * cpus:
            while submitted < 6 * cpus and pool.has_room:
                pool.submit(str(submitted), time.sleep, 0.6)  # longer than a chunk takes
                submitted += 1
            most = max(most, submitted - done)
            done += len(pool.finished())
    assert submitted == done
    assert 2 * cpus <= most <= 3 * cpus


def test_on_many_cpus_a_chunk_takes_longer_than_submitting_a_task_for_each(launcher, monkeypatch):
    monkeypatch.setattr(pool_module, "_TASK_S", 10.0)
    with launcher.pool(PoolOptions(1)) as pool:
        for each in range(12):
            pool.submit(str(each), time.sleep, 0.3)  # longer than half of what a chunk takes
        batches = []
        while results := pool.finished():
            batches.append(len(results))
    assert sum(batches) == 12
    assert max(batches) > 4


def act(number: int, what: str, calls: Path) -> int:
    """Do something, and note the call."""
    with calls.open("a") as file:
        file.write(f"{number}\n")
    print(f"{number} begins", flush=True)
    if what == "raise":
        raise ValueError(number)
    if what == "crash":
        signal.raise_signal(signal.SIGSEGV)  # to this thread: another might take it later
    if what == "hang":
        time.sleep(60)
    return number


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_each_call_of_a_chunk_has_its_own_outcome(launcher, length, tmp_path, monkeypatch):
    """The others run once, whatever happens to one."""
    for name, value in {"_MOST_CALLS": length, "_GROWTH": length, "_CHUNK_S": 1e9}.items():
        monkeypatch.setattr(pool_module, name, value)
    number = 30 + length
    what = {number // 4: "raise", number // 2: "crash", 3 * number // 4: "hang"}
    with launcher.pool(PoolOptions(1, attempts=2, time_limit_s=2)) as pool:
        calls = pool.share(tmp_path / "calls")
        for each in range(number):
            pool.submit(str(each), act, each, what.get(each, ""), calls)
        done = collect(pool)
    kinds = {"raise": ["error"], "crash": ["worker_died"] * 2, "hang": ["timeout"] * 2, "": [None]}
    for each in range(number):
        results, expected = done[str(each)], kinds[what.get(each, "")]
        assert [(r.kind, r.attempt) for r in results] == [*zip(expected, (1, 2), strict=False)]
        assert all(r.output.startswith(f"{each} begins\n") for r in results)
        assert [r.value for r in results if r.kind is None] == [each] * (expected == [None])
    ran = Counter(map(int, (tmp_path / "calls").read_text().split()))
    assert ran == {each: len(done[str(each)]) for each in range(number)}


def test_no_more_tasks_at_a_time_than_asked_for(launcher: RayLauncher, tmp_path, keep):
    most = 2 if keep else 1

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
        assert max(result.value for (result,) in collect(pool).values()) <= most


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
def load(folder: Path) -> None:
    """What takes long to load: the note that it was."""
    (folder / f"{os.getpid()}-{len(list(folder.iterdir()))}").touch()


def predict(folder: Path) -> int:
    load(folder)
    return os.getpid()


@pytest.mark.slow
def test_what_a_task_loads_the_next_one_finds_until_the_pool_ends(launcher, cpus, tmp_path):
    pids: list[set[int]] = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        with launcher.pool(KEPT) as pool:
            for number in range(20):
                pool.submit(str(number), predict, folder)
            pids.append({result.value for (result,) in collect(pool).values()})
            pool.submit("later", predict, folder)
            pids[-1].add(collect(pool)["later"][0].value)
            assert all(map(is_alive, pids[-1]))
        assert len(pids[-1]) == len(list(folder.iterdir())) <= cpus
        wait_until(lambda: not any(map(is_alive, pids[-1])))
    assert not pids[0] & pids[1]
    wait_until(lambda: ray.available_resources().get("CPU", 0) == cpus)


@pytest.mark.slow
def test_a_process_that_died_between_tasks_is_replaced(launcher, tmp_path):
    with launcher.pool(KEPT) as pool:
        pool.submit("x", predict, tmp_path)
        pid = collect(pool)["x"][0].value
        os.kill(pid, signal.SIGKILL)
        pool.submit("y", predict, tmp_path)
        told = collect(pool)["y"]
    assert [(r.kind, r.retried) for r in told] == [("worker_died", True), (None, False)]
    assert told[-1].value != pid


def test_a_share_that_a_pool_has_not_is_refused(launcher: RayLauncher):
    with launcher.pool(PoolOptions(1)) as pool, pytest.raises(ValueError, match="at most 1"):
        pool.submit("too much", pow, 1, 1, cpus=2)
    with launcher.pool(KEPT) as pool:
        pool.submit("the pool's", pow, 2, 2, cpus=1)
        with pytest.raises(ValueError, match="each of its processes has 1"):
            pool.submit("x", pow, 2, 2, cpus=0.25)
        assert collect(pool)["the pool's"][0].value == 4
