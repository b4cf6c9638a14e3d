"""Each workload's training on the smallest card of a GPU profile, and compiled for three cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import scenario
from tests.gpu.conftest import Rig
from tests.gpu.rig.build import PROJECT

pytestmark = pytest.mark.gpu_rig

SMALLEST_GB, OVERRIDES, MT5, SMALL = scenario.cases(__file__, "profiles").values()


def cases() -> list[tuple[str, str, list[str], int]]:
    """Return the configuration, the profile, overrides and bytes of each profile for GPUs."""
    found = []
    for path in sorted(Path(PROJECT, "configs").glob("*.yaml")):
        for name, profile in (yaml.safe_load(path.read_text()).get("profiles") or {}).items():
            if not name.startswith("cpu"):
                smallest = profile.get("min_gpu_memory_gb") or SMALLEST_GB[name]
                overrides = MT5 if name.startswith("mt5") else OVERRIDES[path.stem]
                found.append((path.stem, name, overrides, smallest * 10**9))
    return found


SCRIPT = """
import traceback
from tests.gpu.trainings import stages, train
found = {}
for config, profile, overrides, memory in given:
    os.environ["RIG_MEMORY"] = str(memory)
    try:
        for name, task, settings in stages(config, profile, overrides, memory, "8.6"):
            key = f"{config} {profile} {name}"
            found[key] = train(name, task, settings, compile=False)["reserved"] / memory
            del task
    except Exception:
        found[f"{config} {profile} failed"] = traceback.format_exc()
"""


@pytest.fixture(scope="module")
def shares(rig: Rig) -> dict[str, Any]:
    """The share of the card's memory that each training reserves, from one process."""
    return rig.run(SCRIPT, cases(), name="NVIDIA A40", capability="8.6")


@pytest.mark.parametrize(("config", "profile"), [case[:2] for case in cases()])
def test_a_profile_fits_on_its_smallest_card(config, profile, shares):
    """Without compilation, which lowers the peak. The card refuses more memory than it has."""
    found = {key: each for key, each in shares.items() if key.startswith(f"{config} {profile} ")}
    assert found
    for key, share in found.items():
        assert isinstance(share, float), share
        assert share < 0.95, key


COMPILED = """
from raypipe.training.failure_kinds import failure_kind
from tests.gpu.trainings import stages, train
found = {}
for config, overrides in given.items():
    name, task, settings = next(stages(config, "gpu", overrides, 80 * 10**9, "8.0"))
    sizes = {"precision": "bf16", "micro_batch": 2, "effective_batch": 2}
    eager = train(name, task, settings, compile=False, **sizes)["launches"]
    try:
        found[config] = train(name, task, settings, compile=True, **sizes)["launches"] / eager
    except Exception as error:
        found[config] = failure_kind(error)
"""


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0"])
def test_a_compiled_step_has_fewer_kernels(rig, capability):
    found = rig.run(COMPILED, SMALL, capability=capability)
    for config, share in found.items():
        assert isinstance(share, float), (config, share)
        assert share < 0.9, config


def test_what_does_not_compile_is_trained_without(rig):
    """Inductor cannot split a kernel of PABBO's policy, whose number of duels varies."""
    found = rig.run(COMPILED, {"pabbo_lda": ["train_small.pabbo.burn_in=0"]})
    assert found == {"pabbo_lda": "compile_error"}
