"""Undocumented parts of Ray that raypipe relies on, listed in ``docs/private_apis.md``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray
from ray._raylet import raise_sys_exit_with_custom_error_message
from ray.exceptions import RayTaskError
from ray.train.v2._internal import exceptions
from ray.train.v2.api.exceptions import ControllerError

from raypipe.errors import UnitError
from raypipe.launch import QUIET
from raypipe.launch.failures import group_failure
from raypipe.launch.task import run_task

RAY = Path(ray.__file__).parent
#: variables that raypipe reads or sets elsewhere than in QUIET
OTHERS = (
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S",
    "RAY_OVERRIDE_JOB_RUNTIME_ENV",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_JOB_STOP_WAIT_TIME_S",
)


@pytest.fixture(scope="module")
def source() -> str:
    """Ray's Python sources without tests and RLlib."""
    folders = ("_private", "train", "tune", "dashboard/modules/job")
    files = [file for folder in folders for file in (RAY / folder).rglob("*.py")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("name", [*QUIET, *OTHERS])
def test_ray_reads_the_variable(name: str, source: str) -> None:
    if name == "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER" and not hasattr(ray.train, "PreemptionInfo"):
        pytest.skip("this Ray Train watches for no losses of nodes that could be turned off")
    if name[4].islower():  # a setting of the compiled core, which drops the prefix
        compiled = (RAY / "_raylet.so").read_bytes()
        assert name.removeprefix("RAY_").encode() in compiled
    else:
        assert f'"{name}"' in source


def test_a_group_that_does_not_start_fails_with_one_line() -> None:
    by_worker = RayTaskError("setup", "a long stack of Ray", ValueError("no GPUs found!"))
    failure = group_failure("fit", ControllerError(by_worker), set())
    assert failure.kind == "error"
    assert failure.message == "the worker group does not start: ValueError: no GPUs found!"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.WorkerGroupStartupTimeoutError(2), "timeout"),
        (ControllerError(exceptions.WorkerGroupStartupTimeoutError(2)), "timeout"),
        (exceptions.WorkerHealthCheckTimeoutError("no answer"), "timeout"),
        (
            exceptions.WorkerHealthCheckFailedError("x", UnitError("fit", "invalid_value", "")),
            "invalid_value",
        ),
    ],
)
def test_failures_are_recognized_by_the_names_that_ray_gives(error: Exception, kind: str) -> None:
    assert group_failure("fit", error, set()).kind == kind


def test_the_end_of_a_worker_is_not_the_task_s_exit() -> None:
    def ended_by_ray() -> None:
        raise_sys_exit_with_custom_error_message("The process receives a SIGTERM.")

    with pytest.raises(SystemExit):
        run_task("k", ended_by_ray)
    assert run_task("k", sys.exit, 3).error == "SystemExit: 3"
