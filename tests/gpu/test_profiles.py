"""The memory of each workload's training on the smallest card of each GPU profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gpu.conftest import PROJECT, Rig

pytestmark = pytest.mark.gpu_rig

#: of profiles without ``min_gpu_memory_gb``
SMALLEST_GB = {"gpu": 8, "gpu_bf16": 8, "gpu_small": 4, "gpu_small_bf16": 4}
T5, MT5 = ["model=t5_220m", "copying=false"], ["model=mt5_1_2b", "copying=false"]
RANDOM_LM = ["data={source: random, files: [], tokens: bpe}"]
#: the sizes of the pretrained encoder, and data that needs no download
NEWSGROUPS = [
    "data={source: builtin, dir: null, train: null, test: null, text: [text]}",
    "train.classifier={pretrained: null, hidden: 384, layers: 6}", "encode.model=null",
]  # fmt: skip
OVERRIDES = {
    "lm_pretrain": ["data.source=random"], "lm_shakespeare": RANDOM_LM, "pabbo_lda": [],
    "summarization": T5, "teleclass_newsgroups": NEWSGROUPS,
    "text_classification": [], "transformer": ["data.source=random", "model.numeric=8"],
}  # fmt: skip


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
import json, os, traceback
import torch
from raypipe.training.failure_kinds import expandable_segments
from tests.gpu.profiles import stages, train
os.environ |= expandable_segments()
found = {}
for config, profile, overrides, memory in json.loads(os.environ["CASES"]):
    os.environ["RIG_MEMORY"] = str(memory)
    try:
        for name, task, settings in stages(config, profile, overrides, memory, "8.6"):
            key = f"{config} {profile} {name}"
            found[key] = train(name, task, settings, compile=False)["reserved"] / memory
            del task
    except Exception:
        found[f"{config} {profile} failed"] = traceback.format_exc()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def shares(rig: Rig) -> dict[str, Any]:
    """The share of the card's memory that each training reserves, from one process."""
    environment = {"CASES": json.dumps(cases())}
    return rig.run(SCRIPT, name="NVIDIA A40", capability="8.6", env=environment)


@pytest.mark.parametrize(("config", "profile"), [case[:2] for case in cases()])
def test_a_profile_fits_on_its_smallest_card(config, profile, shares):
    """Without compilation, which lowers the peak. The card refuses more memory than it has."""
    found = {key: each for key, each in shares.items() if key.startswith(f"{config} {profile} ")}
    assert found
    for key, share in found.items():
        assert isinstance(share, float), share
        assert share < 0.95, key
