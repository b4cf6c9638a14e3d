"""Jobs of SLURM, each of which is a run, and the end of a run that goes on.

The comment of a job is the location of its run directory: SLURM itself knows which job a run is,
also while it waits in the queue.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from raypipe.commands import cluster_files, summary
from raypipe.commands.results import opened
from raypipe.errors import ConfigError
from raypipe.redaction import printable
from raypipe.store import run_status
from raypipe.store.run_directory import RunDirectory

#: the options of sbatch for sizes that it calls otherwise
_OPTIONS = {"cpus": "cpus-per-task", "memory": "mem", "gpus": "gpus-per-node"}
#: a job's log in the current directory, with its id; that of an array has a number for each job
_LOG = "raypipe-{}.log"
#: seconds between looks at the queue
_PERIOD_S = 5.0
#: last lines of the log of a job that ended before its run began
_MOST_LINES = 20


def submit(run: RunDirectory, words: Sequence[str], sizes: Mapping[str, int | str]) -> str:
    """Submit a run as a job of SLURM; return the id of the job.

    The script is the one in the current directory, else that of ``raypipe init --slurm``. The run
    directory keeps a copy.

    Args:
        run: the run directory.
        words: the arguments of ``raypipe run``.
        sizes: sizes that override the script's.

    Raises:
        ConfigError: SLURM is missing or has rejected the job, or the run has a job in the queue.

    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--slurm: sbatch is not found; call raypipe on a machine that has SLURM's commands, "
            "such as a login node"
        )
    if job := job_of(run):
        raise ConfigError(
            f"--run-dir {run.shown}: job {job} of this run is in the queue; {_commands(run)}"
        )
    own = Path(cluster_files.SCRIPT)
    text = own.read_text() if own.is_file() else cluster_files.text_of(own.name, "slurm", {})
    options = {_OPTIONS.get(name, name): value for name, value in sizes.items()}
    name, numbers = "%j", ""
    if jobs := options.pop("jobs", None):
        options["array"], name, numbers = f"0-{int(jobs) - 1}", "%A_%a", "_*"
    options |= {"comment": run.shown, "output": _LOG.format(name)}
    listed = [f"--{name}={value}" for name, value in options.items()]
    printed = _slurm("sbatch", "--parsable", *listed, "/dev/stdin", *words, script=text)
    job = printed.partition(";")[0]  # the name of a cluster may follow
    print(f"job {job} (log: {_LOG.format(job + numbers)}); {_commands(run)}", flush=True)
    with suppress(OSError):  # the job says so, too
        run.write(run.path(f".{own.name}"), text.encode())
    return job


def job_of(run: RunDirectory) -> str:
    """Return the id of the job of a run that waits or runs; empty without one, or without SLURM."""
    with suppress(ConfigError, FileNotFoundError):
        for job, state, comment in _jobs():
            if comment == run.shown and not state.startswith("COMPLETING"):  # a reason may follow
                return job
    return ""


def follow(run: RunDirectory, job: str) -> int:
    """Follow a run while its job waits or runs, also after a requeue; return its exit status."""
    first = run_status.read(run)
    seen = first.started_at if first is not None and first.status != "running" else ""
    shown = ""
    status: int | None = None
    while status not in (0, 1):  # an interrupted run may go on
        states = [shown]
        with suppress(ConfigError):  # a busy controller may answer later
            states = [state for found, state, _ in _jobs() if found == job]
        known = run_status.read(run)
        if known is not None and known.started_at != seen:
            seen, status = known.started_at, summary.watch(run)
            continue
        if not states:
            break
        # of an array, once each
        if (now := ", ".join(dict.fromkeys(states))) != shown:
            shown = now
            print(f"job {job}: {shown}", flush=True)
        time.sleep(_PERIOD_S)
    if status is None:
        print(f"job {job} has ended before its run began")
        with suppress(OSError):
            log = next(iter(sorted(Path().glob(_LOG.format(f"{job}*")))), Path())
            lines = log.read_text(errors="replace").splitlines()
            print(printable("\n".join(lines[-_MOST_LINES:]), keep="\n"))
        return 1
    return status


def cancel(run: RunDirectory) -> str:
    """End a run that goes on, its job or its process of this machine; return what was done.

    Raises:
        ConfigError: it does not go on, or its process cannot be ended from here.

    """
    if job := job_of(run):
        if any(state.startswith("RUNNING") for found, state, _ in _jobs() if found == job):
            # the script alone, which ends the run: Ray aborts a command whose servers end first
            _slurm("scancel", "--state=PENDING", job)
            _slurm("scancel", "--batch", "--signal=TERM", job)
        else:
            _slurm("scancel", job)
        return f"job {job} is canceled; finished units are kept"
    found = summary.summary(opened(run.location))
    pid, host = found.details.pid, found.details.host
    if found.status != "running":
        raise ConfigError(f"{run.shown}: does not run; its status is {found.status}")
    if host != platform.node() or not run.is_local:
        raise ConfigError(
            f"{run.shown}: runs on {host or 'another machine'} as process {pid}; end it there "
            f"by kill {pid}, and a job of a Ray cluster by ray job stop"
        )
    with suppress(psutil.Error):  # it has just ended, or is another user's
        process = psutil.Process(pid)
        if run.lock in [file.path for file in process.open_files()]:
            process.terminate()
            return f"process {pid} ends; finished units are kept"
    raise ConfigError(
        f"{run.shown}: process {pid} of this machine does not write it: it has ended, or belongs "
        "to another user or container; end the run where it was started"
    )


def _commands(run: RunDirectory) -> str:
    place = shlex.quote(run.shown)
    return f"follow it: raypipe watch {place}; end it: raypipe cancel {place}"


def _jobs() -> list[list[str]]:
    """Return the id, state and comment of each job of this user. Raises ConfigError.

    The jobs of an array have one id. The state of one that waits has the reason.
    """
    jobs = []
    for line in _slurm("squeue", "--me", "--noheader", "--format=%F|%T|%r|%k").splitlines():
        job, state, reason, comment = line.split("|", 3)
        jobs.append([job, state if reason == "None" else f"{state} ({reason})", comment])
    return jobs


def _slurm(*words: str, script: str | None = None) -> str:
    """Return what a command of SLURM prints. Raises ConfigError if it fails.

    A job gets the environment of the command, which has this Python and raypipe first.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        words,
        env={**os.environ, "PATH": path},
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(printable(done.stderr, keep="\n").strip() or f"{words[0]} has failed")
    return done.stdout.strip()
