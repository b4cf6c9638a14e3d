"""Job submission: a command as a job of a Ray cluster, followed to its exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import join

import aiohttp

from raypipe.errors import ConfigError
from raypipe.redaction import without_credentials

_MODE = "RAY_AUTH_MODE"
#: what Ray reads a token from, and where it keeps one
_TOKEN, _TOKEN_PATH, _TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"
# before Ray is imported: a cluster that wants a token refuses whoever does not say that it has one
if any(os.environ.get(name) for name in (_TOKEN, _TOKEN_PATH)) or (
    Path(_TOKEN_FILE).expanduser().is_file()
):
    os.environ.setdefault(_MODE, "token")

from ray.exceptions import AuthenticationError  # noqa: E402
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient  # noqa: E402

# every file that is left out would be a line
for _name in ("ray", *(kind.__module__ for kind in JobSubmissionClient.__mro__)):
    logging.getLogger(_name).setLevel(logging.ERROR)

#: what no worker needs of the working directory; `.gitignore` is heeded beside it
_EXCLUDES = [".git", "runs", "**/__pycache__"]
#: what Ray would take instead of the address that it is given
_OTHER_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
# what a connection that breaks raises, or a dashboard that is away
_BROKEN = (OSError, RuntimeError, aiohttp.ClientError)
_POLL_S = 1.0
_GIVE_UP_S = 300.0
_SILENCE_S = 60.0
# so long `ray job stop` waits for a run to end in order, before it kills it: seconds
_STOP = {"RAY_JOB_STOP_WAIT_TIME_S": "60"}


def submit(
    address: str,
    command: Sequence[str],
    environment: dict[str, str],
    say: Callable[[str], None],
    *,
    follow: bool = True,
) -> int:
    """Run a command on a cluster with a copy of the current directory.

    Args:
        address: of the cluster's dashboard, ``http://HEAD:8265``.
        command: the words of the command.
        environment: variables it is to have.
        say: what the user is told, the job's log too.
        follow: whether to wait for the end of the job; interrupting that leaves the job running.

    Returns:
        The exit status of the command; 0 where it is not followed, 1 where its end is not known.

    Raises:
        ConfigError: no cluster there, or none that takes this user's token.

    """
    shown = without_credentials(address)
    if "://" not in address:
        raise ConfigError(f"--address {shown}: is no URL; write http://HOST:8265")
    elsewhere = [f"-u {name}" for name in _OTHER_ADDRESSES if os.environ.pop(name, None)]
    ray_job = " ".join(["env", *elsewhere, "ray job"] if elsewhere else ["ray job"])
    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(
            entrypoint=join(command),
            runtime_env={
                "working_dir": ".",
                "excludes": _EXCLUDES,
                "env_vars": _STOP | environment,
            },
        )
    except AuthenticationError as error:
        raise ConfigError(
            f"--address {shown}: this cluster asks for a token: set {_TOKEN} or {_TOKEN_PATH}, "
            f"or put it into {_TOKEN_FILE} (`ray get-auth-token` on the head prints it)"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = without_credentials(str(error))
        raise ConfigError(f"--address {shown}: the job was not taken: {reason}") from error
    say(f"job {job} on {shown} (dashboard: {shown.rstrip('/')}/#/jobs/{job})")
    logs = f"follow it: {ray_job} logs --follow --address {shown} {job}"
    stop = f"end it: {ray_job} stop --address {shown} {job}"
    if not follow:
        say(f"{logs}; {stop}")
        return 0
    try:
        return _status(asyncio.run(_followed(client, job, say)), say)
    except KeyboardInterrupt:
        say(f"the job goes on; {stop}")
        return 130
    except ConnectionError as error:
        say(f"{error}; the job may go on; {logs}; {stop}")
        return 1


async def _followed(
    client: JobSubmissionClient, job: str, say: Callable[[str], None]
) -> JobDetails:
    """Pass the log on until the job has ended; a connection that breaks or is silent is made anew.

    Raises:
        ConnectionError: it could not be made for too long.

    """
    seen, broken_at = 0, None
    while True:
        passed, ended = 0, False
        try:
            with suppress(TimeoutError):
                async for text in _log(client, job):
                    broken_at = None
                    passed += len(text)
                    if passed > seen:  # from the beginning again after a break
                        say(text[len(text) - (passed - seen) :].rstrip("\n"))
                        seen = passed
                ended = True
            details = client.get_job_info(job)
        except _BROKEN as error:
            reason = without_credentials(str(error))
            if broken_at is None:
                broken_at = time.monotonic()
                say(f"the connection to the job broke ({reason}); trying again")
            elif time.monotonic() - broken_at > _GIVE_UP_S:
                raise ConnectionError(f"no connection for {_GIVE_UP_S:.0f} s ({reason})") from error
        else:
            broken_at = None
            if ended and details.status.is_terminal():
                return details
        await asyncio.sleep(_POLL_S)


async def _log(client: JobSubmissionClient, job: str) -> AsyncIterator[str]:
    """The job's log from its beginning on, as it grows.

    Raises:
        TimeoutError: it is silent: the job, or a connection whose other side is gone.

    """
    texts = client.tail_job_logs(job)
    with suppress(StopAsyncIteration):
        while True:
            yield await asyncio.wait_for(anext(texts), _SILENCE_S)


def _status(details: JobDetails, say: Callable[[str], None]) -> int:
    if details.status == JobStatus.SUCCEEDED:
        return 0
    say(f"the job has {details.status.lower()}: {details.message}")
    if details.status == JobStatus.STOPPED:
        return 130
    return details.driver_exit_code or 1
