"""Output of processes that die, and the logs of training workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from example_tasks import Regression, job

from raypipe.launch import task
from raypipe.launch.training import logged
from raypipe.store.run_directory import RunDirectory


def in_child(function: Callable[..., None], *arguments: object) -> int | None:
    """Call a function in a process of its own, as the streams of this one are pytest's."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def die_in_c(text: str) -> None:
    os.write(1, text.encode())
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_output_of_another_task_of_the_same_key_is_not_taken(tmp_path, monkeypatch):
    """As of two commands on one cluster, whose tasks died."""
    monkeypatch.setattr(task, "_folder", lambda: tmp_path)
    for name in ("one", "two"):
        in_child(task.run_in_worker, name, "unit", 1, 1, None, die_in_c, f"words of {name}")
    found = [task.take_output(name)[0] for name in ("three", "two", "one", "one")]
    assert found == ["", "words of two", "words of one", ""]


@pytest.mark.parametrize("place", ["run", "remote"])
def test_a_training_worker_writes_what_it_prints_to_its_log(place, request, tmp_path):
    where: RunDirectory = request.getfixturevalue(place)
    assert in_child(train_loudly, where, tmp_path) == 0
    text = where.read(where.log("fit")).decode()
    lines = ["first", "child s3://***@bucket", "second", "third", "at https://***@host"]
    assert text.splitlines() == lines
    assert where.list(where.logs) == ["fit.log"]  # nothing for the silent worker


def test_a_log_holds_no_credentials_even_if_its_worker_is_killed(run, tmp_path):
    assert in_child(die_loudly, run, tmp_path) == -signal.SIGKILL
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
