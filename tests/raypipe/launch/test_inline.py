"""Everything in this process: one worker for several, and the end of a debugger."""

from __future__ import annotations

import bdb
import time
from dataclasses import replace
from pathlib import Path

import pytest
from example_tasks import Regression, assert_equal, job, weights

from raypipe.errors import UnitError
from raypipe.graph.launcher import PoolOptions, TaskResult
from raypipe.launch.inline import InlineLauncher
from raypipe.training.settings import LoaderSettings


def ended(options: PoolOptions, function, *arguments) -> list[TaskResult]:
    results: list[TaskResult] = []
    with InlineLauncher().pool(options) as pool:
        pool.submit("task", function, *arguments)
        while done := pool.finished():
            results += done
    return results


def test_a_task_has_no_time_limit(capsys):
    for keep in (False, True):
        given = PoolOptions(time_limit_s=0.01, keep_processes=keep)
        assert ended(given, time.sleep, 0.05)[0].error is None
        [failed] = ended(given, divmod, 1, 0)
        assert (failed.kind, failed.error.partition(":")[0]) == ("error", "ZeroDivisionError")
    assert "local: not followed: the time limit of 0.01 s" in capsys.readouterr().out


def quit_debugger() -> None:
    raise bdb.BdbQuit


def test_the_end_of_the_debugger_is_no_failure_of_the_task():
    with pytest.raises(bdb.BdbQuit):
        ended(PoolOptions(), quit_debugger)


def test_several_workers_are_one_with_the_same_model(tmp_path: Path):
    stored = []
    for folder, plan in (("one", (8, 2, 16, 1)), ("two", (8, 1, 16, 2))):
        asked = job(Regression(), tmp_path / folder, plan, loader=LoaderSettings(workers=1))
        outcome = InlineLauncher().train(asked, lambda row: None)
        assert outcome["workers"] == 1
        stored.append(weights(asked))
    assert_equal(*stored)


def test_an_error_of_a_training_has_its_place(tmp_path: Path):
    failing = job(Regression(fail_at=2), tmp_path)
    with pytest.raises(UnitError, match="the machine went away") as caught:
        InlineLauncher().train(failing, lambda row: None)
    assert caught.value.trace is not None
    assert caught.value.trace.frame.endswith("in loss")
    assert caught.value.trace.text.count('File "') == 1


def test_a_resumed_training_says_from_which_step(tmp_path: Path):
    whole = job(Regression(), tmp_path, checkpoint_every=3)
    said: list[str] = []
    InlineLauncher().train(replace(whole, until=3), lambda row: None)
    InlineLauncher().train(whole, lambda row: said.append(row) if isinstance(row, str) else None)
    assert said == ["continues from step 3 of 7 (checkpoint)"]
