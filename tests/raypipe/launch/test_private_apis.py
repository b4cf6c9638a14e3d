"""Undocumented parts of Ray that raypipe relies on, listed in ``docs/private_apis.md``."""

from __future__ import annotations

import inspect
import io
import sys
from pathlib import Path

import pytest
import ray
from ray._private import worker as ray_worker
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray._private.state import state
from ray._raylet import raise_sys_exit_with_custom_error_message
from ray.exceptions import RayTaskError
from ray.train import FailureConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal import exceptions
from ray.train.v2.api.exceptions import ControllerError

from raypipe.errors import UnitError
from raypipe.launch import QUIET, group
from raypipe.launch.capacity import draining_nodes
from raypipe.launch.failures import group_failure
from raypipe.launch.task import run_task

RAY = Path(ray.__file__).parent
#: variables that raypipe reads or sets elsewhere than in QUIET
OTHERS = ("RAY_OVERRIDE_JOB_RUNTIME_ENV", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S")


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
    if name.startswith("RAY_grpc"):  # a setting of the compiled core, which drops the prefix
        compiled = (RAY / "_raylet.so").read_bytes()
        assert name.removeprefix("RAY_").encode() in compiled
    else:
        assert f'"{name}"' in source


@pytest.mark.parametrize("enabled", [True, False])
def test_the_switch_silences_the_logs_of_workers(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "_worker_logs_enabled", enabled)
    printed = io.StringIO()
    log = {"ip": "10.0.0.1", "pid": "1", "lines": ["killed"], "is_err": True, "job": "1"}
    ray_worker.print_worker_logs(log, printed)
    assert ("killed" in printed.getvalue()) is enabled


def test_ray_asks_for_the_name_of_the_first_card(source: str) -> None:
    assert "accelerator_manager.get_current_node_accelerator_type()" in source
    assert callable(NvidiaGPUAcceleratorManager.get_current_node_accelerator_type)


def test_two_of_the_default_callbacks_are_left_out() -> None:
    scaling = ScalingConfig(num_workers=1)
    by_ray = TorchTrainer(_nothing, scaling_config=scaling)._create_default_callbacks()
    ours = group._Trainer(_nothing, scaling_config=scaling)._create_default_callbacks()
    names = [type(callback).__name__ for callback in by_ray]
    assert set(group._NEEDLESS) < set(names)
    assert [type(callback).__name__ for callback in ours] == [
        name for name in names if name not in group._NEEDLESS
    ]


def test_workers_that_do_not_start_are_started_again_once() -> None:
    """Waiting for room is another matter: it goes on for ten minutes."""
    limits = FailureConfig(max_failures=0, controller_failure_limit=group._START_ATTEMPTS)
    dead = ControllerError(exceptions.WorkerGroupStartupFailedError("a worker died"))
    policy = group._Patience(limits)
    assert [policy.make_decision(dead).value for _ in range(2)] == ["RETRY", "RAISE"]
    waiting = ControllerError(exceptions.WorkerGroupStartupTimeoutError(2))
    policy = group._Patience(limits)
    decisions = [policy.make_decision(waiting).value for _ in range(group._START_ATTEMPTS + 1)]
    assert decisions == ["RETRY"] * group._START_ATTEMPTS + ["RAISE"]


def test_the_controller_gets_the_failure_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    method = "_initialize_and_run_controller"
    monkeypatch.setattr(TorchTrainer, method, lambda self, **arguments: given.update(arguments))
    trainer = group._Trainer(_nothing, scaling_config=ScalingConfig(num_workers=1))
    getattr(trainer, method)(failure_policy=None, callbacks=[])
    assert isinstance(given["failure_policy"], group._Patience)
    assert f"self.{method}(" in inspect.getsource(TorchTrainer.fit)


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


def test_nodes_that_will_be_lost_are_read_from_rays_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Accessor:
        def get_draining_nodes(self) -> dict[str, int]:
            return {"node": 0}

    monkeypatch.setattr(type(state), "_connect_and_get_accessor", lambda _: Accessor())
    assert draining_nodes() == {"node"}


def _nothing(config: dict[str, object]) -> None:
    del config


def test_the_end_of_a_worker_is_not_the_task_s_exit() -> None:
    def ended_by_ray() -> None:
        raise_sys_exit_with_custom_error_message("The process receives a SIGTERM.")

    with pytest.raises(SystemExit):
        run_task("k", 1, 1, ended_by_ray)
    assert run_task("k", 1, 1, sys.exit, 3).error == "SystemExit: 3"
