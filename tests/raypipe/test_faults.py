from __future__ import annotations

import os
import signal
import time

import pytest

from raypipe import faults
from raypipe.errors import ConfigError
from raypipe.faults import Faults


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        found.append("killed")

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(signal, "pause", lambda: found.append("hung"))
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


def test_a_worker_dies_once_at_its_step_on_rank_0(ended: list[str]) -> None:
    wanted = Faults(kill_worker_at=3)
    for step, rank, attempt in ((2, 0, 1), (3, 1, 1), (3, 0, 2)):
        wanted.at_step(step, 1, rank, attempt)
    assert ended == []
    wanted.at_step(3, 1, 0, 1)
    assert ended == ["killed"]


def test_tasks_die_or_hang_by_their_identity_at_the_asked_rate(ended: list[str]) -> None:
    def ends(wanted: Faults, attempt: int = 1) -> dict[int, str]:
        found = {}
        for number in range(1000):
            ended.clear()
            wanted.at_task(f"unit/{number}", attempt)
            assert len(ended) <= 1
            if ended:
                found[number] = ended[0]
        return found

    few, many = ends(Faults(kill_task=0.1)), ends(Faults(kill_task=0.5))
    assert 70 < len(few) < 130
    assert 430 < len(many) < 570
    assert few.items() < many.items()
    assert ends(Faults(kill_task=0.1)) == few
    assert ends(Faults(kill_task=1.0, hang_task=1.0), attempt=2) == {}
    assert len(ends(Faults(kill_task=1.0))) == 1000
    both = ends(Faults(kill_task=0.5, hang_task=0.5))
    assert both == {number: many.get(number, "hung") for number in range(1000)}


def test_tasks_wait_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    Faults(delay_task_s=0.5).at_task("a", 2)
    Faults().at_task("a", 1)
    assert waits == [0.5]
