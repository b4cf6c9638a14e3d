"""Machines that a stand-in for NVML shows: what is detected, and what commands say of it.

Detection needs a C compiler, the commands need the CUDA wheel of torch, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import psutil
import pynvml
import pytest

from raypipe import hardware
from raypipe.hardware import TorchBuild
from tests import scenario
from tests.gpu.conftest import Rig
from tests.gpu.rig import build

#: with kernels for 7.5 to 12.0, built for CUDA 13.0
BUILD = TorchBuild("2.13.0", "13.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
MACHINES = scenario.cases(__file__, "machines")


@pytest.fixture(scope="module")
def nvml() -> Iterator[pytest.MonkeyPatch]:
    """The stand-in for NVML, or a skip where there is no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        library = ctypes.CDLL(str(build.nvml_library() / build.NVML))
        for name, value in {"nvmlLib": library, "_nvmlGetFunctionPointer_cache": {}}.items():
            patch.setattr(pynvml, name, value)
        patch.setattr(hardware, "torch_build", lambda: BUILD)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield patch


@pytest.mark.parametrize("name", MACHINES)
def test_gpus_and_problems_of_a_machine(name, nvml):
    case = MACHINES[name]
    uuids, problems = (case.get(key, []) for key in ("gpus", "problems"))
    with nvml.context() as patch:
        for variable, value in case["machine"].items():
            patch.setenv(variable, value)
        found = hardware.detect()
    machine = asdict(found)
    assert pynvml._nvmlLib_refcount == 0, "it is closed as often as it is opened"
    assert [gpu["uuid"] for gpu in machine["gpus"]] == uuids
    host = {"memory_bytes": psutil.virtual_memory().total}
    for gpu, values in zip(machine["gpus"], case.get("values", []), strict=False):
        assert gpu.items() >= (host if values == "memory of the host" else values).items()
    assert machine.items() >= case.get("node", {}).items()
    assert len(machine["gpu_problems"]) == len(problems)
    for problem, parts in zip(machine["gpu_problems"], problems, strict=True):
        assert [part for part in parts if part not in problem] == []
    expected = None if uuids else "no usable GPU" if problems else "no visible GPU"
    assert machine["gpu_note"] == expected
    assert found.device == (machine["gpus"][0]["name"] if uuids else "cpu")


COMMANDS = """
from tests.command import in_process
found = {}
for name, (machine, command) in given.items():
    ended = in_process(None, *command.split(), environment=machine)
    found[name] = ended.status, ended.output
"""
CASES = scenario.cases(__file__, "doctor")


@pytest.fixture(scope="module")
def results(rig: Rig) -> dict[str, Any]:
    """The exit status and the output of every command, from one process."""
    commands = {name: (case.get("machine", {}), case["command"]) for name, case in CASES.items()}
    return rig.run(COMMANDS, commands)


@pytest.mark.gpu_rig
@pytest.mark.parametrize("name", CASES)
def test_a_command_says_what_is_wrong_with_the_gpus(name, results):
    status, output = results[name]
    assert status == CASES[name].get("status", 0), output
    assert [part for part in CASES[name]["says"] if part not in output] == []
