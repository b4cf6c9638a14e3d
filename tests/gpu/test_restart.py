"""A training that does not fit on its card: one restart with what is predicted to fit."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import Rig

pytestmark = pytest.mark.gpu_rig

#: micro-batch 1 fits, and 8 with gradient checkpointing, which is faster
TRAINING = {
    "data.source": "random",
    "model.vocabulary": 512,
    "model.width": 256,
    "model.layers": 16,
    "model.feed_forward": 768,
    "model.heads": 8,
    "model.context": 512,
    "train.training.micro_batch": 64,
    "train.training.effective_batch": 64,
    "train.training.precision": "bf16",
    "train.training.compile": False,
    "train.training.steps": 2,
    "train.training.warmup_steps": 0,
}
CARD = {"name": "NVIDIA A100-SXM4-80GB", "capability": "8.0", "memory": 1_060_000_000}
SCRIPT = f"""
import json, tempfile
import raypipe as rp
from raypipe.training import loop
from raypipe.training.history import History

# kernels compute nothing: no loss or weight has a meaning
History.settle = lambda *_: None
loop.refuse_means = lambda *_: None
run = rp.run("lm_pretrain", {TRAINING}, run_dir=tempfile.mkdtemp(), local=True)
failures = run.failures[["attempt", "kind", "message", "outcome"]].to_dict("records")
(trial,) = run.table("trials").to_dict("records")
names = "status", "micro_batch", "accumulation", "gradient_checkpointing", "attempts"
print(json.dumps({{"failures": failures, "trial": {{name: trial[name] for name in names}}}}))
"""


def test_one_restart_takes_the_fastest_settings_that_fit(rig: Rig) -> None:
    found = rig.run(SCRIPT, **CARD, env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    (failure,) = found["failures"]
    assert failure["kind"] == "out_of_memory"
    assert failure["message"].startswith("CUDA out of memory. Tried to allocate")
    assert failure["outcome"].startswith(
        "again with micro-batch 8 x accumulation 8, gradient checkpointing: predicted "
    )
    assert found["trial"] == {
        "status": "succeeded",
        "micro_batch": 8,
        "accumulation": 8,
        "gradient_checkpointing": True,
        "attempts": 2,
    }
