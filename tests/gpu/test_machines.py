"""Machines that a stand-in for NVML shows: what is detected, and what commands say of it.

Detection needs a C compiler, the commands need the CUDA wheel of torch, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import scenario
from tests.gpu.conftest import Rig
from tests.gpu.rig import build

#: torch with kernels for 7.5 to 12.0, built for CUDA 13.0
DETECT = """
import json, os
from raypipe import hardware
kernels = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
hardware.torch_build = lambda: hardware.TorchBuild("2.13.0", "13.0", kernels)
found = {}
for name, machine in json.loads(os.environ["MACHINES"]).items():
    os.environ.update(machine)
    found[name] = hardware.detect().as_dict()
    for variable in machine:
        del os.environ[variable]
print(json.dumps(found))
"""
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"
MACHINES = scenario.cases(__file__, "machines")


@pytest.fixture(scope="module")
def found(nvml: Path) -> dict[str, Any]:
    """The hardware that each machine detects, from one process."""
    machines = json.dumps({name: case["machine"] for name, case in MACHINES.items()})
    done = subprocess.run(
        [sys.executable, "-c", DETECT],
        env=build.environment(nvml, {"MACHINES": machines}),
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", MACHINES)
def test_gpus_and_problems_of_a_machine(name, found):
    uuids, problems = (MACHINES[name].get(key, []) for key in ("gpus", "problems"))
    machine = found[name]
    assert [gpu["uuid"] for gpu in machine["gpus"]] == uuids
    assert len(machine["gpu_problems"]) == len(problems)
    for problem, parts in zip(machine["gpu_problems"], problems, strict=True):
        for part in parts:
            assert part in problem
    expected = None if uuids else "no usable GPU" if problems else "no visible GPU"
    assert machine["gpu_note"] == expected


def test_a_slice_has_its_own_memory_and_the_capability_of_its_card(found):
    for name in ("MIG", "MIG, one slice named", "MIG, the card named"):
        gpu = found[name]["gpus"][0]
        assert gpu["memory_bytes"] == 85_000_000_000 // 8
        assert gpu["compute_capability"] == "9.0"
        assert gpu["name"] == f"{H100} MIG 1g"


def test_a_gpu_without_memory_of_its_own_has_the_host_s(found):
    for name in ("GB10", "GB10 that reports no bytes"):
        assert found[name]["gpus"][0]["memory_bytes"] == psutil.virtual_memory().total


def test_numbers_are_those_of_nvml(found):
    assert [(gpu["index"], gpu["name"]) for gpu in found["mixed cards"]["gpus"]] == [
        (0, A100),
        (1, H100),
    ]


COMMANDS = """
import contextlib, io, json, os, sys
from raypipe.cli import main
results = {}
for name, (machine, command) in json.loads(os.environ["COMMANDS"]).items():
    os.environ.update(machine)
    output, sys.argv = io.StringIO(), ["raypipe", *command.split()]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main()
        except SystemExit as ended:
            results[name] = [ended.code or 0, output.getvalue()]
    for variable in machine:
        del os.environ[variable]
print(json.dumps(results))
"""
CASES = scenario.cases(__file__, "doctor")


@pytest.fixture(scope="module")
def results(rig: Rig) -> dict[str, Any]:
    """The exit status and the output of every command, from one process."""
    commands = {name: (case.get("machine", {}), case["command"]) for name, case in CASES.items()}
    return rig.run(COMMANDS, env={"COMMANDS": json.dumps(commands)})


@pytest.mark.gpu_rig
@pytest.mark.parametrize("name", CASES)
def test_a_command_says_what_is_wrong_with_the_gpus(name, results):
    status, output = results[name]
    assert status == CASES[name].get("status", 0), output
    for part in CASES[name]["says"]:
        assert part in output
