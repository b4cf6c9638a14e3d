"""Errors of a full card and of page-locked memory, as torch's CUDA wheel raises them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu_rig

SCRIPT = """
import json, torch
from raypipe.training.failure_kinds import failure_kind

held = []

def kind_of(call):
    try:
        call()
    except Exception as error:
        return failure_kind(error), str(error).splitlines()[0]
    return None, ""

def fill():
    while True:
        held.append(torch.empty(2**27, dtype=torch.uint8, device="cuda"))

def unclear():
    raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`")

source = torch.zeros(2**26, dtype=torch.uint8, device="cuda")
found = {
    "pinned": kind_of(lambda: torch.empty(2**26, dtype=torch.uint8, pin_memory=True)),
    "pinned copy": kind_of(lambda: torch.empty(2**26, dtype=torch.uint8).pin_memory()),
    "copy to the host": kind_of(lambda: source.to("cpu", non_blocking=True)),
    "library": kind_of(unclear),
    "allocation": kind_of(fill),
    "library on a full card": kind_of(unclear),
}
print(json.dumps(found))
"""


@pytest.mark.parametrize("segments", ["False", "True"])
def test_kinds_of_failure_on_a_card(rig, segments):
    options = {
        "RIG_PINNED": str(2**24),
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{segments}",
    }
    found = rig.run(SCRIPT, memory=4_000_000_000, env=options)
    assert {name: kind for name, (kind, _) in found.items()} == {
        "pinned": "host_out_of_memory",
        "pinned copy": "host_out_of_memory",
        "copy to the host": "host_out_of_memory",  # the card has room
        "library": "error",
        "allocation": "out_of_memory",
        "library on a full card": "out_of_memory",
    }
    # it does not say whose memory it is
    assert found["copy to the host"][1] == "CUDA error: out of memory"


ONE_FULL = """
import json, tempfile
from dataclasses import replace
from pathlib import Path
import torch
import torch.distributed as dist
from raypipe.launch.cluster import RayLauncher
from raypipe.training.recovery import train_to_the_end
from tests.gpu.rig.objects import exchange_by_store, read_ones
from tests.raypipe.examples.example_tasks import Regression
from tests.raypipe.launch.test_train import job

class Full(Regression):
    def build_model(self):
        read_ones()
        exchange_by_store()
        return super().build_model()

    def evaluate(self, model, device, batch_size):
        return {}

    def loss(self, model, batch, context):
        samples = len(batch["x"])
        one, both = samples > 4 and dist.get_rank() == 1, samples in (3, 4)
        if context.step == 1 and (one or both):
            torch.empty(10**12, dtype=torch.uint8, device="cuda")
        return super().loss(model, batch, context)

def launch(job):
    return launcher.train(job, lambda row: None)

def on_failure(job, error, outcome):
    failures.append((error.kind, error.limit.size, outcome))

made = job(Path(tempfile.mkdtemp()), 8, 1, 2, steps=2)
settings = made.settings.changed("scaling", gpus_per_worker=1.0, cpus_per_worker=0.5)
failures, launcher = [], RayLauncher()
last, outcome = train_to_the_end(replace(made, task=Full(), settings=settings), launch, on_failure)
launcher.close()
print(json.dumps({"failures": failures, "steps": outcome["steps"]}))
"""


def test_the_group_starts_again_with_smaller_micro_batches(rig, tmp_path):
    """At first rank 0 waits in an exchange for rank 1, which has failed."""
    found = rig.run(ONE_FULL, cards=2, env={"RIG_NCCL_MEETING": str(tmp_path)})
    again = "again with micro-batch {} x accumulation {}"
    assert found["failures"] == [
        ["out_of_memory", 8, again.format(4, 2)],
        ["out_of_memory", 4, again.format(2, 4)],
    ]
    assert found["steps"] == 2
