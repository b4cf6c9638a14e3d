"""The stand-in libraries behave as CUDA does in what the other tests rely on."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu_rig

STEP = """
import json, torch
from tests.gpu.rig.counters import counters
model = torch.nn.Linear(1024, 1024, device="cuda")
model(torch.ones(8, 1024, device="cuda")).sum().backward()
before = dict(counters)
model.weight.grad.norm().item()
print(json.dumps({
    "before": before, "after": dict(counters),
    "allocated": torch.cuda.max_memory_allocated(), "name": torch.cuda.get_device_name(),
}))
"""


def test_launches_products_copies_and_syncs_are_counted(rig):
    found = rig.run(STEP, name="NVIDIA RTX A6000", capability="8.6")
    before, after = found["before"], found["after"]
    assert found["name"] == "NVIDIA RTX A6000"
    assert found["allocated"] >= 2 * 4 * 1024 * 1024  # weights and gradients
    assert before["gemms"] >= 2
    assert before["syncs"] == 0
    assert (after["syncs"], after["d2h"], after["d2h_bytes"]) == (1, 1, 4)
    assert after["launches"] > before["launches"] > before["gemms"]


FILL = """
import json, torch
kept, error = [], ""
try:
    while True:
        kept.append(torch.empty(2**30, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as caught:
    error = str(caught)
from tests.gpu.rig.counters import counters
held = len(kept)
kept.clear()
torch.cuda.empty_cache()
print(json.dumps({"error": error, "held": held, "free": torch.cuda.mem_get_info(),
                  "ooms": counters["ooms"]}))
"""


@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_memory_ends_at_the_capacity(rig, segments):
    found = rig.run(FILL, memory=8 * 2**30, env={"PYTORCH_CUDA_ALLOC_CONF": segments})
    assert "CUDA out of memory" in found["error"]
    assert found["held"] == 7  # the context takes the rest
    assert found["ooms"] >= 1
    assert found["free"] == [8 * 2**30 - 520 * 2**20, 8 * 2**30]


FIRST_KERNEL = """
import json, torch
error = ""
try:
    torch.ones(1, device="cuda")
except Exception as caught:
    error = str(caught)
print(json.dumps({"error": error}))
"""


def test_a_card_without_kernels_fails_at_the_first_one(rig):
    found = rig.run(FIRST_KERNEL, name="Tesla V100-SXM2-16GB", capability="7.0")
    assert "no kernel image is available" in found["error"]
    # kernels for 8.0 and 8.6 run there
    assert rig.run(FIRST_KERNEL, capability="8.9")["error"] == ""


EXCHANGE = """
import json, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tests.gpu.rig.counters import counters
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)

def exchanged(wrap):
    model = wrap(torch.nn.Linear(512, 512, bias=False, device="cuda"))
    before = dict(counters)
    model(torch.ones(4, 512, device="cuda")).sum().backward()
    kinds = "gather_bytes", "scatter_bytes", "reduce_bytes"
    return [counters[kind] - before[kind] for kind in kinds]

print(json.dumps({
    "ddp": exchanged(lambda model: DistributedDataParallel(model, device_ids=[0])),
    "fsdp": exchanged(lambda model: fully_shard(model, mesh=init_device_mesh("cuda", (2,)))),
}))
"""


def test_one_rank_of_two_exchanges_its_gradients(rig):
    found = rig.run(EXCHANGE, cards=2)
    size = 512 * 512 * 4
    assert found["ddp"] == [0, 0, size]
    assert found["fsdp"] == [size // 2, size // 2, 0]
