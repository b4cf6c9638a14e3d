"""Tests on cards that do not exist: torch's CUDA wheel on stand-in libraries.

The lane needs ``RAYPIPE_GPU_RIG``, the Python of an environment with the CUDA wheel of torch and
with raypipe. `make test-gpu-rig` creates one.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.rig import build

VARIABLE = "RAYPIPE_GPU_RIG"
BEGIN = """
import json, os, sys
given = json.loads(sys.argv[1])
"""
#: A thread of autograd may still need the interpreter right after a backward pass; if it is gone,
#: the process aborts.
END = """
print(json.dumps(found, default=str), flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Rig:
    """Run scripts on fake cards; the compiler finds nothing that was compiled before."""

    python: str
    libraries: Path
    caches: Path

    def run(self, script: str, given: object = None, **machine: object) -> Any:
        """Run a Python script on a machine and return what it leaves in ``found``, as JSON.

        The script has ``given``, after JSON, and has imported json, os and sys. ``machine`` has
        variables of machine.h, such as ``cards=2`` for ``RIG_CARDS``.
        """
        cache, cuda = tempfile.mkdtemp(dir=self.caches), self.libraries / build.CUDA
        variables = {
            **os.environ,
            "PYTHONPATH": str(build.PROJECT),
            "LD_LIBRARY_PATH": str(self.libraries),
            "RAYPIPE_CACHE": cache,
            "TRITON_CACHE_DIR": f"{cache}/t",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/i",
            **{f"RIG_{name.upper()}": str(value) for name, value in machine.items()},
        }
        if cuda.exists():
            variables |= {"LD_PRELOAD": str(cuda), "RIG_LIBRARY": str(cuda)}
            variables["TRITON_LIBCUDA_PATH"] = str(self.libraries)
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            variables.pop(name, None)
        done = subprocess.run(
            [self.python, "-c", BEGIN + script + END, json.dumps(given)],
            env=variables,
            cwd=build.PROJECT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """The rig, or a skip where there is no CUDA wheel of torch or no compiler."""
    python = os.environ.get(VARIABLE)
    if python is None:
        pytest.skip(f"{VARIABLE} does not name a Python with the CUDA wheel of torch")
    return Rig(python, build.cuda_libraries(python), tmp_path_factory.mktemp("caches"))
