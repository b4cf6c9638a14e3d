"""A command as a job of a Ray cluster, through its Jobs API: sent, followed, its status taken."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import join

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
        The exit status of the command; 0 where it is not followed.

    Raises:
        ConfigError: no cluster there, or none that takes this user's token.

    """
    shown = without_credentials(address)
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
    stop = f"ray job stop --address {shown} {job}"
    if not follow:
        say(f"follow it: ray job logs --follow --address {shown} {job}; end it: {stop}")
        return 0
    try:
        asyncio.run(_follow(client, job, say))
        return _status(client.get_job_info(job), say)
    except KeyboardInterrupt:
        say(f"the job goes on; end it: {stop}")
        return 130


async def _follow(client: JobSubmissionClient, job: str, say: Callable[[str], None]) -> None:
    """Pass the log on until the job has ended; a connection that breaks is made anew."""
    seen = 0
    while True:
        passed = 0
        try:
            async for text in client.tail_job_logs(job):
                passed += len(text)
                if passed > seen:  # from the beginning again after a break
                    say(text[len(text) - (passed - seen) :].rstrip("\n"))
                    seen = passed
        except (RuntimeError, OSError) as error:
            say(f"the connection to the job's log broke ({error}); trying again")
        if client.get_job_status(job).is_terminal():
            return
        await asyncio.sleep(1)


def _status(details: JobDetails, say: Callable[[str], None]) -> int:
    if details.status == JobStatus.SUCCEEDED:
        return 0
    say(f"the job has {details.status.lower()}: {details.message}")
    if details.status == JobStatus.STOPPED:
        return 130
    return details.driver_exit_code or 1
