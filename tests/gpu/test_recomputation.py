"""Memory and products of gradient checkpointing on fake cards."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import Rig

pytestmark = pytest.mark.gpu_rig

SCRIPT = """
import json
from tests.gpu.trainings import Case, language_model, run
kinds = {
    "plain": {},
    "all": {"gradient_checkpointing": True},
    "cheap": {"gradient_checkpointing": True, "recompute": "cheap"},
    "compiled": {"gradient_checkpointing": True, "recompute": "cheap", "compile": True},
}
print(json.dumps(run({
    name: Case(language_model(), (16, 1, 16, 1), training={"precision": "bf16", **kind})
    for name, kind in kinds.items()
})))
"""


def test_cheap_recomputation_repeats_no_product_and_saves_half_of_the_memory(rig: Rig) -> None:
    found = rig.run(SCRIPT)
    plain, everything = found["plain"], found["all"]
    assert everything["gemms"] > plain["gemms"]
    for name in ("cheap", "compiled"):
        each = found[name]
        assert each["gemms"] == plain["gemms"], name
        assert each["syncs"] == 0
        saved = (plain["peak"] - each["peak"]) / (plain["peak"] - everything["peak"])
        assert 0.5 < saved < 1, name
