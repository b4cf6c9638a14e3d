"""A whole training on a fake card: telemetry, pinned batches, and fp16's scaler in checkpoints."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu_rig

SCRIPT = """
import torch
from tests.raypipe.examples.example_tasks import HeldOut, job
from raypipe.store.tables import read_table
from raypipe.training import loader, loop
from raypipe.training.checkpoint import CheckpointStore
from raypipe.training.history import History
from raypipe.training.parallel import Worker
from raypipe.training.settings import LoaderSettings

# kernels compute nothing: no loss has a meaning
loop.refuse_means = lambda *_: None
History.settle = lambda self, measures=None: self._pending and self._pending[2].values()
pinned, to_device = set(), loader.to_device

def watched(batch, device, *, pin):
    pinned.add(pin)
    return to_device(batch, device, pin=pin)

loader.to_device = watched

class Task(HeldOut):
    def evaluate(self, model, device, batch_size):
        return {}  # that of the example is for a CPU

    def flops_per_sample(self, model):
        return 1e9

def asked(workers, **options):
    training = {"checkpoint_every": 2, "precision": "fp16", "steps": 60, "eval_every": 30}
    return job(Task(dtype=torch.float32, **options), folder, loader=LoaderSettings(workers=workers),
               **training)

folder, worker, said = given, Worker(0, torch.device("cuda", 0)), []
try:
    loop.train(asked(1, fail_at=5), worker)
except ConnectionError:
    pass
scale = CheckpointStore(asked(1).run_dir, "fit").newest().scaler["scale"]
torch.empty(2**30, dtype=torch.uint8, device="cuda")  # of a larger training before, and freed
outcome = loop.train(asked(1), worker, said.append)
rows = read_table(asked(1).run_dir, "gpu_samples")
found = {
    "scale": scale, "said": [text for text in said if isinstance(text, str)],
    "pinned": sorted(pinned), "samples": rows.iloc[-1].to_dict(),
    "outcome": {name: outcome[name] for name in (
        "steps", "device", "gpu_peak_bytes", "energy_j", "mfu", "skipped_steps")},
}
"""


def test_a_training_on_a_card(rig, tmp_path):
    found = rig.run(SCRIPT, str(tmp_path))
    assert found["said"] == ["continues from step 4 of 60 (checkpoint)"]
    assert found["pinned"] == [True]
    assert found["scale"] == 0.0  # the scaler's tensor was on the card, where no kernel filled it
    sample, outcome = found["samples"], found["outcome"]
    assert sample["gpu_uuid"] == "GPU-11111111-1111-1111-1111-111111111100"
    assert (sample["util"], sample["memory_bytes"], sample["power_w"]) == (42.0, 2**30, 300.0)
    assert (outcome["steps"], outcome["device"]) == (60, "NVIDIA H100 80GB HBM3")
    assert 0 < outcome["gpu_peak_bytes"] < 2**30
    assert outcome["energy_j"] > 0
    assert outcome["mfu"] > 0
    assert outcome["skipped_steps"] is not None
