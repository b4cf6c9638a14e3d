"""Tests on cards that do not exist: torch's CUDA wheel on stand-in libraries.

The lane needs ``RAYPIPE_GPU_RIG``, the Python of an environment with the CUDA wheel of torch and
with raypipe. `make test-gpu-rig` creates one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.rig import build

PROJECT = Path(__file__).resolve().parents[2]
VARIABLE = "RAYPIPE_GPU_RIG"
#: End of a script. A thread of autograd may still need the interpreter right after a backward
#: pass; if it is gone, the process aborts.
ENDING = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""
#: processes that it starts import it
TRAIN = """
from tests.gpu import trainings
if __name__ == "__main__":
    trainings.main()
"""


def compiler_caches(folder: Path) -> dict[str, str]:
    """Variables that let the compiler find nothing that was compiled before."""
    return {"TRITON_CACHE_DIR": f"{folder}/t", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/i"}


@dataclass(frozen=True)
class Rig:
    """Run scripts and commands on fake cards."""

    python: str
    libraries: Path
    cache: Path

    def environment(
        self,
        *,
        cards: int = 1,
        name: str = "NVIDIA H100 80GB HBM3",
        capability: str = "9.0",
        memory: int | str = 85_000_000_000,
        env: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Return the environment of a process on a machine with such cards.

        ``name``, ``capability`` and ``memory`` may be lists with an entry per card, separated by
        semicolons. ``env`` is added; machine.h lists the other variables of a machine.
        """
        machine = {
            "RIG_CARDS": str(cards),
            "RIG_NAME": name,
            "RIG_CAPABILITY": capability,
            "RIG_MEMORY": str(memory),
            "PYTHONPATH": str(PROJECT),
            "RAYPIPE_CACHE": str(self.cache),
            **(env or {}),
        }
        return build.environment(self.libraries, machine)

    def run(self, script: str, **machine: Any) -> dict[str, Any]:
        """Run a Python script on a machine and return the JSON of its last line of output.

        The arguments are those of ``environment``.
        """
        done = self.call(["-c", script + ENDING], **machine)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return result

    def train(self, cases: Mapping[str, Any], **machine: Any) -> dict[str, Any]:
        """Train the small language model in each case and return what ``trainings.run`` does.

        A case has fields of ``trainings.Case``; the other arguments are those of ``environment``.
        """
        environment = {"CASES": json.dumps(cases), **machine.pop("env", {})}
        return self.run(TRAIN, env=environment, **machine)

    def call(self, arguments: Sequence[str], **machine: Any) -> subprocess.CompletedProcess[str]:
        """Run the interpreter with arguments on a machine, in the project's folder."""
        return subprocess.run(
            [self.python, *arguments],
            env=self.environment(**machine),
            cwd=PROJECT,
            capture_output=True,
            text=True,
        )


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """The rig, or a skip where there is no CUDA wheel of torch or no compiler."""
    python = os.environ.get(VARIABLE)
    if python is None:
        pytest.skip(f"{VARIABLE} does not name a Python with the CUDA wheel of torch")
    try:
        libraries = build.cuda_libraries(python)
    except build.CannotBuildError as error:
        pytest.skip(f"the stand-in libraries cannot be built: {error}")
    return Rig(python, libraries, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def nvml() -> Path:
    """The folder of the stand-in for NVML alone, or a skip where there is no compiler."""
    try:
        return build.nvml_library()
    except build.CannotBuildError as error:
        pytest.skip(f"the stand-in for NVML cannot be built: {error}")
