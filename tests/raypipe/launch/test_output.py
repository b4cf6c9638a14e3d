"""What tasks print on Ray reaches the driver, also when their process dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from example_tasks import Regression, job

from raypipe.graph.launcher import PoolOptions, TaskResult
from raypipe.launch import task
from raypipe.launch.cluster import RayLauncher
from raypipe.launch.output import logged
from raypipe.store.run_directory import RunDirectory


@pytest.fixture(params=[False, True], ids=["tasks", "kept"])
def keep(request: pytest.FixtureRequest) -> bool:
    """Whether a pool keeps its processes."""
    return bool(request.param)


def collected(launcher: RayLauncher, options: PoolOptions, *calls) -> dict[str, list[TaskResult]]:
    done: dict[str, list[TaskResult]] = {}
    with launcher.pool(options) as pool:
        for key, function, *arguments in calls:
            pool.submit(key, function, *arguments)
        while ended := pool.finished():
            for result in ended:
                done.setdefault(result.key, []).append(result)
    return done


def speak(text: str) -> str:
    print(text)
    print("to stderr", file=sys.stderr)
    os.system("echo from a child")
    return text


def die(text: str) -> None:
    print(text)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_c(text: str) -> None:
    os.write(1, text.encode())
    os.kill(os.getpid(), signal.SIGKILL)


def hang(text: str) -> None:
    print(text)
    time.sleep(60)


def shout(size: int) -> None:
    print("begin" + "x" * size + "end")
    raise ValueError("too loud")


def stop_here() -> None:
    breakpoint()


def lock() -> object:
    return threading.Lock()


def test_output_and_errors_come_with_the_results(launcher: RayLauncher, keep):
    done = collected(
        launcher,
        PoolOptions(0.5, keep_processes=keep),
        ("loud", speak, "hello"),
        ("silent", pow, 2, 2),
        ("long", shout, 10**6),
        ("debugger", stop_here),
        ("unsendable", lock),
    )
    results = {key: result for key, (result,) in done.items()}
    lines = results["loud"].output.split("\n")
    assert sorted(filter(None, lines)) == ["from a child", "hello", "to stderr"]
    assert (results["silent"].output, results["silent"].value) == ("", 4)
    long = results["long"]
    assert len(long.output) < 70_000
    assert long.output.startswith("beginx")
    assert long.output.endswith("xend\n")
    assert long.error == "ValueError: too loud"
    assert "use `raypipe run --local`" in results["debugger"].error
    assert results["debugger"].trace.frame.endswith("in stop_here")
    unsendable = results["unsendable"]
    assert unsendable.kind == "error"
    assert "lock" in unsendable.error
    assert "\x1b" not in unsendable.trace.text


def test_the_output_of_a_dead_process_is_found(launcher: RayLauncher, keep):
    options = PoolOptions(0.5, attempts=2, keep_processes=keep)
    done = collected(launcher, options, ("dead", die, "last words"), ("fine", speak, "hello"))
    assert [result.kind for result in done["dead"]] == ["worker_died"] * 2
    assert [result.output for result in done["dead"]] == ["last words\n"] * 2
    assert [result.trace for result in done["dead"]] == [None] * 2


def test_the_output_of_another_pool_s_task_of_the_same_key_is_not_taken(tmp_path, monkeypatch):
    """As of two commands on one cluster, whose tasks died."""
    monkeypatch.setattr(task, "_folder", lambda: tmp_path)
    for pool in ("one", "two"):
        arguments = pool, "unit", 1, 1, None, die_in_c, f"words of {pool}"
        context = multiprocessing.get_context("fork")
        process = context.Process(target=task.run_in_worker, args=arguments)
        process.start()
        process.join()
    found = [task.take_output(pool, "unit", 1)[0] for pool in ("three", "two", "one", "one")]
    assert found == ["", "words of two", "words of one", ""]


def test_at_the_time_limit_the_output_says_where_the_task_was(launcher: RayLauncher, keep):
    options = PoolOptions(0.5, time_limit_s=1.0, attempts=1, keep_processes=keep)
    (result,) = collected(launcher, options, ("hung", hang, "waiting"))["hung"]
    assert result.kind == "timeout"
    assert result.output.startswith("waiting\nTimeout")
    assert "in hang" in result.output


@pytest.mark.parametrize("place", ["run", "remote"])
def test_a_training_worker_writes_what_it_prints_to_its_log(place, request, tmp_path):
    """In a process of its own, as the streams of this one are pytest's."""
    where: RunDirectory = request.getfixturevalue(place)
    process = multiprocessing.get_context("fork").Process(
        target=train_loudly, args=(where, tmp_path)
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    text = where.read(where.log("fit")).decode()
    lines = ["first", "child s3://***@bucket", "second", "third", "at https://***@host"]
    assert text.splitlines() == lines
    assert where.list(where.logs) == ["fit.log"]  # nothing for the silent worker


def test_a_log_holds_no_credentials_even_if_its_worker_is_killed(run, tmp_path):
    process = multiprocessing.get_context("fork").Process(target=die_loudly, args=(run, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not (text := run.read(run.log("fit"))).endswith(b"words"):
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
    assert text == b"s3://***@bucket\nlast words"


def die_loudly(where: RunDirectory, folder: Path) -> None:
    with logged(replace(job(Regression(), folder), run_dir=where), rank=0):
        os.write(1, b"s3://key:secret@bucket\nlast words")
        os.kill(os.getpid(), signal.SIGKILL)


def train_loudly(where: RunDirectory, folder: Path) -> None:
    loud = replace(job(Regression(), folder), run_dir=where)
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
