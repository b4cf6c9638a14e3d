"""The configurations are valid, and a small run computes every stage."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent
SMALL = shlex.split(r"""{small}""")


def raypipe(*arguments):
    """Run a command in this folder; return what it prints."""
    command = [sys.executable, "-m", "raypipe", *map(str, arguments)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("path", sorted(PROJECT.rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_configuration_is_valid(path):
    assert "experiment: {package}\n" in raypipe("config", path)


def test_a_small_run_computes_every_stage(tmp_path):
    raypipe("run", "{config}", *SMALL, "--run-dir", tmp_path)
    assert "nothing to do" in raypipe("run", "{config}", *SMALL, "--run-dir", tmp_path)
