"""Errors of a full card and of page-locked memory, as torch's CUDA wheel raises them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu_rig

SCRIPT = """
import torch
from raypipe.training.failure_kinds import failure_kind

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{given}"
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
"""


@pytest.mark.parametrize("segments", [False, True])
def test_kinds_of_failure_on_a_card(rig, segments):
    found = rig.run(SCRIPT, segments, memory=4_000_000_000, pinned=2**24)
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
import torch
import torch.distributed as dist
from raypipe.launch.cluster import RayLauncher
from raypipe.training.recovery import train_to_the_end
from tests.gpu.rig.objects import OnCards, job_of

class Full(OnCards):
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

failures, launcher = [], RayLauncher()
last, outcome = train_to_the_end(job_of(Full(), 8, 1, 2), launch, on_failure)
launcher.close()
found = {"failures": failures, "steps": outcome["steps"]}
"""


def test_the_group_starts_again_with_smaller_micro_batches(rig, tmp_path):
    """At first rank 0 waits in an exchange for rank 1, which has failed."""
    found = rig.run(ONE_FULL, cards=2, nccl_meeting=tmp_path)
    again = "again with micro-batch {} x accumulation {}"
    assert found["failures"] == [
        ["out_of_memory", 8, again.format(4, 2)],
        ["out_of_memory", 4, again.format(2, 4)],
    ]
    assert found["steps"] == 2
