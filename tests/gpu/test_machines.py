"""Machines that a stand-in for NVML shows: what is detected, and what commands say of it.

Detection needs a C compiler, the commands need the CUDA wheel of torch, too.
"""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from tests import scenario
from tests.gpu.conftest import Rig

#: torch with kernels for 7.5 to 12.0, built for CUDA 13.0
DETECT = """
from raypipe import hardware
kernels = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
hardware.torch_build = lambda: hardware.TorchBuild("2.13.0", "13.0", kernels)
found = {}
for name, machine in given.items():
    os.environ.update(machine)
    found[name] = hardware.detect().as_dict()
    for variable in machine:
        del os.environ[variable]
"""
MACHINES = scenario.cases(__file__, "machines")


@pytest.fixture(scope="module")
def found(nvml: Rig) -> dict[str, Any]:
    """The hardware that each machine detects, from one process."""
    return nvml.run(DETECT, {name: case["machine"] for name, case in MACHINES.items()})


@pytest.mark.parametrize("name", MACHINES)
def test_gpus_and_problems_of_a_machine(name, found):
    uuids, problems = (MACHINES[name].get(key, []) for key in ("gpus", "problems"))
    machine = found[name]
    assert [gpu["uuid"] for gpu in machine["gpus"]] == uuids
    for gpu, values in zip(machine["gpus"], MACHINES[name].get("values", []), strict=False):
        assert gpu.items() >= values.items()
    assert len(machine["gpu_problems"]) == len(problems)
    for problem, parts in zip(machine["gpu_problems"], problems, strict=True):
        assert [part for part in parts if part not in problem] == []
    expected = None if uuids else "no usable GPU" if problems else "no visible GPU"
    assert machine["gpu_note"] == expected


@pytest.mark.parametrize("name", ["GB10", "GB10 that reports no bytes"])
def test_a_gpu_without_memory_of_its_own_has_the_host_s(name, found):
    assert found[name]["gpus"][0]["memory_bytes"] == psutil.virtual_memory().total


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
