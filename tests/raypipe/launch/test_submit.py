"""A job is followed until its end, whatever becomes of the connection.

The same on a real cluster is in ``tests/clusters/test_nodes.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import ModuleType, SimpleNamespace

import aiohttp
import pytest
import requests
from ray.job_submission import JobStatus

from raypipe.errors import ConfigError

#: a step of a connection whose other side went away without a word
SILENCE = ""
Step = str | Exception


class Dashboard:
    """Answers each call with the next of its script: a text or status, or what goes wrong."""

    def __init__(self, logs: Sequence[Sequence[Step]], infos: Sequence[JobStatus | Exception]):
        self._logs, self._infos = iter(logs), iter(infos)
        self.addresses: list[str] = []

    def __call__(self, address: str) -> Dashboard:
        self.addresses.append(address)
        return self

    def submit_job(self, **_: object) -> str:
        return "job_1"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for step in next(self._logs):
            if isinstance(step, Exception):
                raise step
            if step == SILENCE:
                await asyncio.sleep(3600)
            yield step

    def get_job_info(self, job: str) -> SimpleNamespace:
        found = next(self._infos)
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(status=found, driver_exit_code=0, message="")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What sends jobs; where the user has a token, it says so to all of Ray in this process."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from raypipe.launch import submit

    monkeypatch.setattr(submit, "_POLL_S", 0.0)
    return submit


@pytest.fixture
def sent(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Dashboard, str], tuple[int, list[str]]]:
    """Send a command to such a dashboard; its status and what the user is told."""

    def send(dashboard: Dashboard, address: str = "http://head:8265") -> tuple[int, list[str]]:
        monkeypatch.setattr(module, "JobSubmissionClient", dashboard)
        said: list[str] = []
        return module.submit(address, ["raypipe"], {}, said.append), said

    return send


def test_a_connection_that_breaks_is_made_anew_and_no_line_comes_twice(sent):
    away = requests.ConnectionError("refused")
    logs = [
        ["one\n", RuntimeError("closed")],
        [aiohttp.ServerDisconnectedError()],
        [away],
        ["one\ntwo\n"],
        ["one\n", "two\nthree\n"],
    ]
    status, said = sent(Dashboard(logs, [away, JobStatus.SUCCEEDED]))
    assert status == 0
    assert [text for text in said if "job" not in text] == ["one", "two", "three"]
    assert [text for text in said if "trying again" in text] == [
        "the connection to the job broke (closed); trying again",
        "the connection to the job broke (refused); trying again",
    ]


def test_a_connection_that_is_silent_is_made_anew(sent, module, monkeypatch):
    """Neither the job's silence nor the end of the job while nobody listened loses a line."""
    monkeypatch.setattr(module, "_SILENCE_S", 0.05)
    logs = [[SILENCE], ["one\n", SILENCE], ["one\ntwo\n", SILENCE], ["one\ntwo\n", "three\n"]]
    ends = [JobStatus.PENDING, JobStatus.RUNNING, JobStatus.SUCCEEDED, JobStatus.SUCCEEDED]
    status, said = sent(Dashboard(logs, ends))
    assert status == 0
    assert said[1:] == ["one", "two", "three"]


def test_a_connection_that_stays_away_is_given_up_and_the_job_is_not(sent, module, monkeypatch):
    monkeypatch.setattr(module, "_GIVE_UP_S", -1.0)
    away = [OSError("the tunnel is closed for http://me:secret@head")]
    status, said = sent(Dashboard([away] * 3, []))
    assert status == 1
    assert "the job may go on; follow it: ray job logs --follow" in said[-1]
    assert "ray job stop --address http://head:8265 job_1" in said[-1]
    assert not any("secret" in text for text in said)


def test_the_address_that_is_given_is_the_one(sent, module, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    dashboard = Dashboard([[]], [JobStatus.STOPPED])
    status, said = sent(dashboard)
    assert status == 130
    assert dashboard.addresses == ["http://head:8265"]
    assert "RAY_ADDRESS" not in module.os.environ
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    said = []
    module.submit("http://head:8265", ["raypipe"], {}, said.append, follow=False)
    assert "env -u RAY_ADDRESS ray job stop" in said[-1]


def test_an_address_without_a_scheme_is_refused_at_once(module):
    with pytest.raises(ConfigError, match="--address head:8265: is no URL; write http://HOST:8265"):
        module.submit("head:8265", ["raypipe"], {}, print)
