"""Hardware detection on machines that a stand-in for NVML shows. Needs a C compiler, no CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

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
TWO = {"RIG_CARDS": "2"}
MIXED = {"RIG_CARDS": "2", "RIG_NAME": f"{A100};{H100}", "RIG_CAPABILITY": "8.0;9.0"}
UUIDS = [f"GPU-11111111-1111-1111-1111-11111111110{card}" for card in range(3)]
SLICES = [f"MIG-22222222-2222-2222-2222-22222222{n:02x}00" for n in range(3)]
VISIBLE = "CUDA_VISIBLE_DEVICES"
GB10 = {"RIG_NAME": "NVIDIA GB10", "RIG_CAPABILITY": "12.1"}
V100 = {"RIG_NAME": "Tesla V100-SXM2-16GB", "RIG_CAPABILITY": "7.0"}
WHEEL = "--index-url https://download.pytorch.org/whl/"

#: by machine: its variables, the UUIDs of the GPUs that are found, and parts of each problem
MACHINES: dict[str, tuple[dict[str, str], list[str], list[list[str]]]] = {
    "two cards": (TWO, UUIDS[:2], []),
    "none visible": ({**TWO, "CUDA_VISIBLE_DEVICES": ""}, [], []),
    "hidden by a number": ({**TWO, "CUDA_VISIBLE_DEVICES": "1"}, UUIDS[1:2], []),
    "named by UUIDs": ({**TWO, VISIBLE: f"{UUIDS[1]},{UUIDS[0]}"}, UUIDS[1::-1], []),
    "an unknown UUID": (
        {**TWO, "CUDA_VISIBLE_DEVICES": "GPU-22"},
        [],
        [["CUDA_VISIBLE_DEVICES=GPU-22", "GPU-22 is not one GPU", UUIDS[0]]],
    ),
    "MIG": ({"RIG_SLICES": "3"}, SLICES, []),
    "MIG, one slice named": ({"RIG_SLICES": "3", VISIBLE: SLICES[1]}, SLICES[1:2], []),
    "MIG, the card named": ({"RIG_SLICES": "3", VISIBLE: "0"}, SLICES[:1], []),
    "MIG without slices": (
        {**TWO, "RIG_SLICES": "0;-1"},
        UUIDS[1:2],
        [["GPU 0: MIG is enabled and has no slice", "nvidia-smi mig -i 0 -cgi"]],
    ),
    "a lost card": (
        {**TWO, "RIG_LOST": "1;0"},
        UUIDS[1:2],
        [["GPU 0: GPU is lost", "nvidia-smi --gpu-reset -i 0"]],
    ),
    "a lost card that is hidden": ({**TWO, "RIG_LOST": "1;0", VISIBLE: "1"}, UUIDS[1:2], []),
    "GB10": ({**GB10, "RIG_NO_MEMORY": "1"}, UUIDS[:1], []),
    "GB10 that reports no bytes": ({**GB10, "RIG_MEMORY": "0"}, UUIDS[:1], []),
    "an old driver": (
        {**TWO, "RIG_DRIVER": "550.54.14", "RIG_CUDA": "12040"},
        [],
        [["driver 550.54.14 supports CUDA 12.4", "update the driver", f"{WHEEL}cu126"]],
    ),
    "V100": (V100, [], [["no kernels for compute capability 7.0", f"{WHEEL}cu126"]]),
    "V100 and an older driver": (
        {**V100, "RIG_DRIVER": "550.54.14", "RIG_CUDA": "12040"},
        [],
        [["supports CUDA 12.4 at most", f"{WHEEL}cu126"]],
    ),
    "mixed cards": (MIXED, UUIDS[:2], []),
    "mixed cards in CUDA's order": (
        {**MIXED, "CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
        [],
        [["CUDA_DEVICE_ORDER=FASTEST_FIRST", "unset it"]],
    ),
    "a card without kernels next to one with": (
        {"RIG_CARDS": "2", "RIG_NAME": f"Tesla V100;{H100}", "RIG_CAPABILITY": "7.0;9.0"},
        UUIDS[1:2],
        [["Tesla V100: torch 2.13.0 has no kernels"]],
    ),
}


@pytest.fixture(scope="module")
def found(nvml: Path) -> dict[str, Any]:
    """The hardware that each machine detects, from one process."""
    machines = json.dumps({name: machine for name, (machine, _, _) in MACHINES.items()})
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
    _, uuids, problems = MACHINES[name]
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
