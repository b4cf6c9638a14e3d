"""Every model compiled by Inductor and Triton for three generations of cards."""

from __future__ import annotations

import json

import pytest

from tests.gpu.conftest import compiler_caches
from tests.gpu.test_profiles import NEWSGROUPS

pytestmark = pytest.mark.gpu_rig

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
SCRIPT = """
import json, os
import torch
from raypipe.training.failure_kinds import failure_kind
from tests.gpu.profiles import stages, train
found = {}
for config, overrides in json.loads(os.environ["MODELS"]).items():
    name, task, settings = next(stages(config, "gpu", overrides, 80 * 10**9, "8.0"))
    sizes = {"precision": "bf16", "micro_batch": 2, "effective_batch": 2}
    eager = train(name, task, settings, compile=False, **sizes)["launches"]
    try:
        found[config] = train(name, task, settings, compile=True, **sizes)["launches"] / eager
    except Exception as error:
        found[config] = failure_kind(error)
print(json.dumps(found))
"""


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0"])
def test_a_compiled_step_has_fewer_kernels(rig, capability, tmp_path):
    found = rig.run(
        SCRIPT,
        capability=capability,
        env={"MODELS": json.dumps(SMALL), **compiler_caches(tmp_path)},
    )
    for config, share in found.items():
        assert isinstance(share, float), (config, share)
        assert share < 0.9, config


def test_what_does_not_compile_is_trained_without(rig, tmp_path):
    """Inductor cannot split a kernel of PABBO's policy, whose number of duels varies."""
    models = {"pabbo_lda": ["train_small.pabbo.burn_in=0"]}
    found = rig.run(SCRIPT, env={"MODELS": json.dumps(models), **compiler_caches(tmp_path)})
    assert found == {"pabbo_lda": "compile_error"}
