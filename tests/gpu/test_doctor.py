"""``raypipe doctor`` and ``run`` on machines with the CUDA wheel: messages and exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import scenario
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
CASES = scenario.cases(__file__, "doctor")


@pytest.fixture(scope="module")
def results(rig: Rig) -> dict[str, Any]:
    """The exit status and the output of every command, from one process."""
    commands = {name: (case.get("machine", {}), case["command"]) for name, case in CASES.items()}
    return rig.run(COMMANDS, env={"COMMANDS": json.dumps(commands)})


@pytest.mark.parametrize("name", CASES)
def test_a_command_says_what_is_wrong_with_the_gpus(name, results):
    status, output = results[name]
    assert status == CASES[name].get("status", 0), output
    for part in CASES[name]["says"]:
        assert part in output
