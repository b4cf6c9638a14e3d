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
