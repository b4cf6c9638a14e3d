"""``raypipe doctor`` and ``run`` on machines with the CUDA wheel: messages and exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu.conftest import Rig

pytestmark = pytest.mark.gpu_rig

COMMANDS = """
import contextlib, io, json, os, sys
from raypipe.cli import main
results = {}
for name, (machine, command) in json.loads(os.environ["COMMANDS"]).items():
    os.environ.update(machine)
    output, sys.argv = io.StringIO(), ["raypipe", *command]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main()
        except SystemExit as ended:
            results[name] = [ended.code or 0, output.getvalue()]
    for variable in machine:
        del os.environ[variable]
print(json.dumps(results))
"""
V100 = {"RIG_NAME": "Tesla V100-SXM2-16GB", "RIG_CAPABILITY": "7.0", "RIG_MEMORY": "16900000000"}
OLD_DRIVER = {"RIG_DRIVER": "550.54.14", "RIG_CUDA": "12040"}
SLICE = "MIG-22222222-2222-2222-2222-222222220100"
DOCTOR, RUN = ["doctor"], ["run", "quickstart"]

#: by machine: its variables, the command, the exit status, and lines or parts of lines
CASES: dict[str, tuple[dict[str, str], list[str], int, list[str]]] = {
    "H100": (
        {},
        DOCTOR,
        0,
        ["GPU 0: NVIDIA H100 80GB HBM3, 79.2 GiB, compute capability 9.0, GPU-11111111"],
    ),
    "two cards": ({"RIG_CARDS": "2"}, DOCTOR, 0, ["GPU 0: ", "GPU 1: "]),
    "none visible": ({"CUDA_VISIBLE_DEVICES": ""}, DOCTOR, 0, ["no GPU (no visible GPU)"]),
    "a UUID": ({"CUDA_VISIBLE_DEVICES": "GPU-1111"}, DOCTOR, 0, ["GPU 0: "]),
    "an unknown UUID": (
        {"CUDA_VISIBLE_DEVICES": "GPU-22"},
        DOCTOR,
        2,
        ["no GPU (no usable GPU)", "not used: CUDA_VISIBLE_DEVICES=GPU-22"],
    ),
    "MIG": ({"RIG_SLICES": "2"}, DOCTOR, 0, ["MIG 1g, 9.9 GiB", SLICE]),
    "one slice": (
        {"RIG_SLICES": "2", "CUDA_VISIBLE_DEVICES": SLICE},
        DOCTOR,
        0,
        [f"MIG 1g, 9.9 GiB, compute capability 9.0, {SLICE}"],
    ),
    "a lost card": (
        {"RIG_CARDS": "2", "RIG_LOST": "1;0"},
        DOCTOR,
        0,
        ["GPU 1: ", "not used: GPU 0: GPU is lost"],
    ),
    "all cards lost": ({"RIG_LOST": "1"}, DOCTOR, 2, ["not used: GPU 0: GPU is lost"]),
    "GB10": (
        {"RIG_NAME": "NVIDIA GB10", "RIG_CAPABILITY": "12.1", "RIG_NO_MEMORY": "1"},
        DOCTOR,
        0,
        ["GPU 0: NVIDIA GB10, ", "compute capability 12.1"],
    ),
    "an old driver": (
        OLD_DRIVER,
        DOCTOR,
        2,
        ["driver 550.54.14 supports CUDA 12.4 at most", "https://download.pytorch.org/whl/cu126"],
    ),
    "V100": (
        V100,
        DOCTOR,
        2,
        ["has no kernels for compute capability 7.0", "https://download.pytorch.org/whl/cu126"],
    ),
    "mixed cards": (
        {"RIG_CARDS": "2", "RIG_NAME": "Tesla V100;NVIDIA A100", "RIG_CAPABILITY": "7.0;8.0"},
        DOCTOR,
        0,
        ["GPU 1: NVIDIA A100", "not used: Tesla V100: "],
    ),
    "run with an old driver": (
        OLD_DRIVER,
        RUN,
        2,
        ["no GPU can be used", "driver to 580 or newer", "CUDA_VISIBLE_DEVICES"],
    ),
    "run on a V100": (V100, RUN, 2, ["no GPU can be used", "no kernels for compute capability"]),
    "fit on a V100": (V100, ["fit", "quickstart"], 2, ["no GPU can be used"]),
    "run on an unknown slice": (
        {"RIG_SLICES": "2", "CUDA_VISIBLE_DEVICES": "MIG-33"},
        RUN,
        2,
        ["no GPU can be used", "MIG-33 is not one GPU"],
    ),
}


@pytest.fixture(scope="module")
def results(rig: Rig) -> dict[str, Any]:
    """The exit status and the output of every command, from one process."""
    commands = json.dumps({name: case[:2] for name, case in CASES.items()})
    return rig.run(COMMANDS, env={"COMMANDS": commands})


@pytest.mark.parametrize("name", CASES)
def test_a_command_says_what_is_wrong_with_the_gpus(name: str, results: dict[str, Any]) -> None:
    _, _, expected, parts = CASES[name]
    status, output = results[name]
    assert status == expected, output
    for part in parts:
        assert part in output
