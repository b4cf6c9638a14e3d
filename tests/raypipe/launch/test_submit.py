"""A job is followed until its end, or that of the connection.

The same on a real cluster is in ``tests/clusters/test_nodes.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace

import aiohttp
import pytest
import requests
from ray.job_submission import JobStatus


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What sends jobs; where the user has a token, it says so to all of Ray in this process."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from raypipe.launch import submit

    monkeypatch.setattr(submit, "_POLL_S", 0.0)
    return submit


class Dashboard:
    """A log, in which something may go wrong, and then one status of the job after the other."""

    def __init__(self, *log: str | Exception, ends: tuple[JobStatus, ...] = ()) -> None:
        self._log, self._statuses = log, iter(ends)

    def submit_job(self, **_: object) -> str:
        return "job_1"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        for step in self._log:
            if isinstance(step, Exception):
                raise step
            yield step

    def get_job_info(self, job: str) -> SimpleNamespace:
        return SimpleNamespace(status=next(self._statuses), driver_exit_code=0, message="")


def sent(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, dashboard: Dashboard
) -> tuple[int, list[str]]:
    """Send a command to a dashboard; its status and what the user is told."""
    clients = {"http://head:8265": dashboard}
    monkeypatch.setattr(module, "JobSubmissionClient", clients.__getitem__)
    said: list[str] = []
    return module.submit("http://head:8265", ["raypipe"], {}, said.append), said


@pytest.mark.parametrize(
    ("end", "expected", "more"),
    [(JobStatus.SUCCEEDED, 0, []), (JobStatus.STOPPED, 130, ["the job has stopped: "])],
)
def test_a_job_is_followed_to_its_end(module, monkeypatch, end, expected, more):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    dashboard = Dashboard("one\n", "two\nthree\n", ends=(JobStatus.RUNNING, end))
    status, said = sent(module, monkeypatch, dashboard)
    assert status == expected
    assert said[1:] == ["one", "two\nthree", *more]
    assert "RAY_ADDRESS" not in module.os.environ  # the address that is given is the one


@pytest.mark.parametrize(
    "broken",
    [
        OSError("the tunnel is closed for http://me:secret@head"),
        RuntimeError("closed"),
        aiohttp.ServerDisconnectedError(),
        requests.ConnectionError("refused"),
    ],
)
def test_a_broken_connection_is_said_with_how_to_follow_the_job_again(module, monkeypatch, broken):
    status, said = sent(module, monkeypatch, Dashboard("one\n", broken))
    assert status == 1
    assert said[1] == "one"
    assert "the job may go on; follow it: ray job logs --follow" in said[-1]
    assert "ray job stop --address http://head:8265 job_1" in said[-1]
    assert not any("secret" in text for text in said)
