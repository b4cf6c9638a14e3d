"""Each workload's training on the smallest card of a GPU profile, and compiled for three cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gpu.conftest import Rig
from tests.gpu.rig.build import PROJECT

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


#: small models of the workloads: a block takes as long to compile as that of a large one
SMALL = {
    "lm_pretrain": [
        "data.source=random", "model.vocabulary=512", "model.width=64", "model.heads=4",
        "model.layers=2", "model.feed_forward=192", "model.context=64",
    ],
    "transformer": ["data.source=random", "model.numeric=8", "model.hidden=64", "model.layers=2"],
    "summarization": [
        "model=small", "copying=false", "data.source_length=64", "data.target_length=32",
    ],
    "teleclass_newsgroups": [*NEWSGROUPS, "train.classifier.layers=2"],
}  # fmt: skip
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
