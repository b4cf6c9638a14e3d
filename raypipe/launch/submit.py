"""Job submission: a command as a job of a Ray cluster, followed to its exit status."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import join

import aiohttp

from raypipe.errors import ConfigError
from raypipe.redaction import without_credentials

#: environment variables and file from which Ray reads a token
_TOKEN, _TOKEN_PATH, _TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"
# before Ray is imported: a cluster with tokens rejects clients that do not announce one
if any(os.environ.get(name) for name in (_TOKEN, _TOKEN_PATH)) or (
    Path(_TOKEN_FILE).expanduser().is_file()
):
    os.environ.setdefault("RAY_AUTH_MODE", "token")

from ray.exceptions import AuthenticationError  # noqa: E402
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient  # noqa: E402

# Ray would log a line per excluded file
for _name in ("ray", *(kind.__module__ for kind in JobSubmissionClient.__mro__)):
    logging.getLogger(_name).setLevel(logging.ERROR)

# errors of a broken connection or an unreachable dashboard
_BROKEN = (OSError, RuntimeError, aiohttp.ClientError)
_POLL_S = 1.0


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
        environment: environment variables of the command.
        say: receives messages for the user, and the job's log.
        follow: whether to wait for the end of the job; interrupting the wait leaves it running.

    Returns:
        The exit status of the command; 0 if it is not followed, 1 if its end is unknown.

    Raises:
        ConfigError: there is no cluster at the address, or it rejects this user's token.

    """
    shown = without_credentials(address)
    if "://" not in address:
        raise ConfigError(f"--address {shown}: is no URL; write http://HOST:8265")
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):  # Ray would prefer them
        os.environ.pop(name, None)
    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(
            entrypoint=join(command),
            runtime_env={
                "working_dir": ".",
                # no worker needs them; `.gitignore` has others
                "excludes": [".git", "runs", "**/__pycache__"],
                # seconds that `ray job stop` waits for a run to end before killing it
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60", **environment},
            },
        )
    except AuthenticationError as error:
        raise ConfigError(
            f"--address {shown}: this cluster asks for a token: set {_TOKEN} or {_TOKEN_PATH}, "
            f"or write it to {_TOKEN_FILE} (`ray get-auth-token` on the head prints it)"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = without_credentials(str(error))
        raise ConfigError(f"--address {shown}: the cluster rejected the job: {reason}") from error
    say(f"job {job} on {shown} (dashboard: {shown.rstrip('/')}/#/jobs/{job})")
    logs = f"follow it: ray job logs --follow --address {shown} {job}"
    stop = f"end it: ray job stop --address {shown} {job}"
    if not follow:
        say(f"{logs}; {stop}")
        return 0
    try:
        details = asyncio.run(_followed(client, job, say))
    except KeyboardInterrupt:
        say(f"the job is still running; {stop}")
        return 130
    except _BROKEN as error:
        reason = without_credentials(str(error))
        say(f"the connection to the job broke ({reason}); the job may go on; {logs}; {stop}")
        return 1
    if details.status == JobStatus.SUCCEEDED:
        return 0
    say(f"the job has {details.status.lower()}: {details.message}")
    return 130 if details.status == JobStatus.STOPPED else details.driver_exit_code or 1


async def _followed(
    client: JobSubmissionClient, job: str, say: Callable[[str], None]
) -> JobDetails:
    """Forward the log until the job has ended."""
    async for text in client.tail_job_logs(job):
        say(text.rstrip("\n"))
    while not (details := client.get_job_info(job)).status.is_terminal():
        await asyncio.sleep(_POLL_S)
    return details
