from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from raypipe import faults
from raypipe.errors import ConfigError
from raypipe.faults import Faults


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((pid, number)))
    return found


def test_the_variable_is_read_in_all_its_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert faults.from_environment() == Faults()
    monkeypatch.setenv(faults.VARIABLE, "")
    assert faults.from_environment() == Faults()
    value = "oom:micro_batch>4, kill_worker:step=3,kill_task:p=0.25,hang_task:p=.1,delay_task:s=.5"
    monkeypatch.setenv(faults.VARIABLE, value)
    assert faults.from_environment() == Faults(4, 3, 0.25, 0.1, 0.5)


@pytest.mark.parametrize(
    "value",
    ["oom", "oom:micro_batch>-1", "oom:micro_batch>4,typo", "kill_task:p=x", "kill_task:p=2"],
)
def test_a_fault_nobody_knows_is_a_mistake(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, value)
    with pytest.raises(ConfigError, match=r"RAYPIPE_FAULTS: .*allowed: oom:micro_batch>N"):
        faults.from_environment()


def test_out_of_memory_above_a_micro_batch() -> None:
    wanted = Faults(oom_above=4)
    wanted.at_step(0, 4, 0, 1)
    for attempt in (1, 2):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            wanted.at_step(0, 5, 1, attempt)


def test_a_worker_dies_once_at_its_step_on_rank_0(kills: list[tuple[int, int]]) -> None:
    wanted = Faults(kill_worker_at=3)
    for step, rank, attempt in ((2, 0, 1), (3, 1, 1), (3, 0, 2)):
        wanted.at_step(step, 1, rank, attempt)
    assert kills == []
    wanted.at_step(3, 1, 0, 1)
    assert kills == [(os.getpid(), signal.SIGKILL)]


def test_tasks_die_by_their_identity_at_the_asked_rate(kills: list[tuple[int, int]]) -> None:
    def dead(wanted: Faults, attempt: int = 1) -> set[int]:
        found = set()
        for number in range(1000):
            kills.clear()
            wanted.at_task(f"unit/{number}", attempt)
            if kills:
                found.add(number)
        return found

    few, many = dead(Faults(kill_task=0.1)), dead(Faults(kill_task=0.5))
    assert 70 < len(few) < 130
    assert 430 < len(many) < 570
    assert few < many
    assert dead(Faults(kill_task=0.1)) == few
    assert dead(Faults(kill_task=1.0), attempt=2) == set()
    assert len(dead(Faults(kill_task=1.0))) == 1000


def test_tasks_wait_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    Faults(delay_task_s=0.5).at_task("a", 2)
    Faults().at_task("a", 1)
    assert waits == [0.5]


def test_others_hang_than_die(
    monkeypatch: pytest.MonkeyPatch, kills: list[tuple[int, int]]
) -> None:
    hung: list[str] = []
    monkeypatch.setattr(signal, "pause", lambda: hung.append("here"))
    wanted = Faults(kill_task=0.5, hang_task=0.5)
    for number in range(100):
        wanted.at_task(f"unit/{number}", 1)
        assert len(kills) + len(hung) == number + 1
    assert min(len(kills), len(hung)) > 30
    wanted.at_task("unit/0", 2)
    assert len(kills) + len(hung) == 100
