"""Memory, launches and exchanged bytes of training steps on fake cards."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import Rig

pytestmark = pytest.mark.gpu_rig

TOGETHER = """
import json
from tests.gpu.trainings import Case, language_model, run
if __name__ == "__main__":
    task, cases = language_model(), {}
    plans = {"plain": (4, 1, 8, 2), "half": (2, 2, 8, 2), "accumulating": (4, 2, 16, 2)}
    for name, plan in plans.items():
        cases[f"ddp {name}"] = Case(task, plan)
        cases[f"fsdp {name}"] = Case(task, plan, "fsdp")
    cases["fsdp bf16"] = Case(task, (4, 1, 8, 2), "fsdp", {"precision": "bf16"})
    cases["fsdp half bf16"] = Case(task, (2, 2, 8, 2), "fsdp", {"precision": "bf16"})
    print(json.dumps(run(cases)))
"""


def test_no_card_keeps_the_whole_gradient_and_bf16_halves_what_is_gathered(rig: Rig) -> None:
    found = rig.run(TOGETHER, cards=2)
    fsdp, more = found["fsdp plain"], found["fsdp accumulating"]
    assert found["fsdp half"]["peak"] <= fsdp["peak"]
    # the gradient has a memory pool of its own, that of the stream that reduces it: it is reserved
    # with and without accumulation, also where it is larger than half of the activations (bf16)
    assert found["fsdp half"]["reserved"] <= fsdp["reserved"]
    assert found["fsdp half bf16"]["reserved"] <= found["fsdp bf16"]["reserved"]
    # the next micro-batch finds half of the gradient on each card, not all of it
    assert more["peak"] <= fsdp["peak"] + 0.55 * fsdp["weights"]
    assert more["scatter_bytes"] == 2 * fsdp["scatter_bytes"]
    assert more["gather_bytes"] == 2 * fsdp["gather_bytes"]
    # DDP arranges its buckets anew in the second step, when they may hold a gradient
    assert found["ddp accumulating"]["peak"] <= found["ddp plain"]["peak"] + 1.05 * fsdp["weights"]
    assert found["ddp accumulating"]["reduce_bytes"] == found["ddp plain"]["reduce_bytes"]
    half = found["fsdp bf16"]
    assert half["gather_bytes"] < 0.55 * fsdp["gather_bytes"]  # embeddings stay in fp32
    assert half["scatter_bytes"] == fsdp["scatter_bytes"]  # gradients are reduced in fp32
    for each in found.values():
        assert each["expandable"]
        assert each["syncs"] == 0


ALONE = """
import json
from tests.gpu.trainings import Case, language_model, run
task = language_model()
cases = {
    "fp32": Case(task, (1, 4, 4, 1), training={"gradient_checkpointing": True}),
    "bf16": Case(task, (1, 4, 4, 1), training={
        "gradient_checkpointing": True, "precision": "bf16"}),
    "copies": Case(task, (1, 4, 4, 1), training={"precision": "bf16"}),
    "plain": Case(task, (1, 4, 4, 1)),
}
print(json.dumps(run(cases)))
"""


def test_half_precision_keeps_no_copies_of_recomputed_blocks(rig: Rig) -> None:
    """At micro-batch 1 the copies are larger than the activations that bf16 saves."""
    found = rig.run(ALONE)
    assert found["bf16"]["peak"] <= 1.01 * found["fp32"]["peak"]  # one block's copies
    assert found["copies"]["peak"] > found["plain"]["peak"]
    assert found["plain"]["expandable"]
