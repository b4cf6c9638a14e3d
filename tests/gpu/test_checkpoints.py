"""A training on a card that resumes from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.conftest import Rig

pytestmark = pytest.mark.gpu_rig

SCRIPT = """
import json, sys, torch
sys.path.insert(0, "tests/raypipe/examples")
from example_tasks import Regression, job
from raypipe.training.checkpoint import CheckpointStore
from raypipe.training.parallel import Worker
from raypipe.training.loop import train

worker, said = Worker(0, torch.device("cuda", 0)), []

class Task(Regression):
    def evaluate(self, model, device, batch_size):
        return {{}}  # that of the example is for a CPU

def asked(**options):
    return job(Task(dtype=torch.float32, **options), {folder!r}, checkpoint_every=2)

try:
    train(asked(fail_at=5), worker)
except ConnectionError:
    pass
store = CheckpointStore(asked().run_dir, "fit")
[first, *_] = store.newest().optimizer["state"].values()
outcome = train(asked(), worker, said.append)
print(json.dumps({{
    "steps": outcome["steps"], "said": [text for text in said if isinstance(text, str)],
    "devices": sorted({{value.device.type for value in first.values()}}),
}}))
"""


def test_a_training_resumes_on_a_card(rig: Rig, tmp_path: Path) -> None:
    found = rig.run(SCRIPT.format(folder=str(tmp_path)))
    assert found == {
        "steps": 7,
        "said": ["continues from step 4 of 7 (checkpoint)"],
        "devices": ["cpu"],
    }
