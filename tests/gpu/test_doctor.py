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
V100 = {"RIG_NAME": "Tesla V100-SXM2-16GB", "RIG_CAPABILITY": "7.0", "RIG_MEMORY": "16900000000"}
OLD_DRIVER = {"RIG_DRIVER": "550.54.14", "RIG_CUDA": "12040"}
MIXED = {"RIG_CARDS": "2", "RIG_NAME": "Tesla V100;NVIDIA A100", "RIG_CAPABILITY": "7.0;8.0"}
UNKNOWN = {"CUDA_VISIBLE_DEVICES": "GPU-22"}
CARD = "GPU 0: NVIDIA H100 80GB HBM3, 79.2 GiB, compute capability 9.0, GPU-11111111"
KERNELS = "has no kernels for compute capability 7.0"
OTHER_BUILD = "https://download.pytorch.org/whl/cu126"
#: by machine: its variables, the command, the exit status, and lines or parts of lines; which GPUs
#: are found is in test_machines.py
CASES: dict[str, tuple[dict[str, str], str, int, list[str]]] = {
    "H100": ({}, "doctor", 0, [CARD]),
    "unknown UUID": (UNKNOWN, "doctor", 2, ["no usable GPU", "CUDA_VISIBLE_DEVICES=GPU-22"]),
    "old driver": (OLD_DRIVER, "doctor", 2, ["supports CUDA 12.4 at most", OTHER_BUILD]),
    "V100": (V100, "doctor", 2, [KERNELS, OTHER_BUILD]),
    "mixed cards": (MIXED, "doctor", 0, ["GPU 1: NVIDIA A100", "not used: Tesla V100: "]),
    "run with an old driver": (OLD_DRIVER, "run quickstart", 2, ["driver to 580 or newer"]),
    "run on a V100": (V100, "run quickstart", 2, ["no GPU can be used", KERNELS]),
    "fit on a V100": (V100, "fit quickstart", 2, ["no GPU can be used"]),
}


@pytest.fixture(scope="module")
def results(rig: Rig) -> dict[str, Any]:
    """The exit status and the output of every command, from one process."""
    commands = json.dumps({name: case[:2] for name, case in CASES.items()})
    return rig.run(COMMANDS, env={"COMMANDS": commands})


@pytest.mark.parametrize("name", CASES)
def test_a_command_says_what_is_wrong_with_the_gpus(name, results):
    _, _, expected, parts = CASES[name]
    status, output = results[name]
    assert status == expected, output
    for part in parts:
        assert part in output
