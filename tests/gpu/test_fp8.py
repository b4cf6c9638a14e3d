"""Training steps in fp8 on fake cards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.conftest import Rig, compiler_caches

pytestmark = pytest.mark.gpu_rig

STEPS = """
import json
from collections import Counter
from importlib.util import find_spec
from torch.profiler import ProfilerActivity, profile
from tests.gpu.trainings import SMALL, Case, language_model, run

def steps(**training):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        found = run({"": Case(language_model(), training=training)})[""]
    counted = Counter(event.name for event in profiled.events())
    return found | {"scaled": counted["aten::_scaled_mm"]}

if find_spec("torchao") is None:
    print(json.dumps(None))
else:
    found = {name: steps(precision=name) for name in ("bf16", "fp8")}
    found["compiled"] = steps(precision="fp8", compile=True)
    print(json.dumps(found | {"layers": SMALL.layers}))
"""

SHARDED = """
import json, os, tempfile
import torch
import torch.distributed as dist
from raypipe.training.parallel import Worker
from tests.gpu import trainings
task, device = trainings.language_model(), torch.device("cuda", 0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)
case = trainings.Case(task, (4, 1, 8, 2), "fsdp", {"precision": os.environ["PRECISION"]})
with tempfile.TemporaryDirectory() as folder:
    print(json.dumps(trainings._train_all({"": case}, Worker(0, device, 2), folder)[""]))
"""


@pytest.fixture(scope="module")
def found(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compiled")
    steps = rig.run(STEPS, env=compiler_caches(folder))
    if steps is None:
        pytest.skip("torchao is not installed for the Python of the rig (extra fp8)")
    return steps


def test_the_linear_layers_of_blocks_multiply_in_fp8(found):
    """Three products per step and layer: the output, and the gradients of input and weight."""
    products = 3 * 4 * found["layers"]
    half, fp8 = found["bf16"], found["fp8"]
    assert fp8["gemms"] == half["gemms"] > products
    assert half["scaled"] == 0
    assert fp8["scaled"] == 3 * products  # three steps


def test_fp8_needs_no_more_memory_than_bf16_never_waits_and_fuses_conversions(found):
    assert found["fp8"]["peak"] <= found["bf16"]["peak"]  # no copies of the weights in bf16
    assert found["fp8"]["syncs"] == found["compiled"]["syncs"] == 0
    assert found["compiled"]["launches"] < 0.5 * found["fp8"]["launches"]


@pytest.mark.usefixtures("found")  # with torchao
def test_sharded_weights_are_gathered_in_bf16_and_need_hardly_more_memory(rig):
    half, fp8 = (rig.run(SHARDED, env={"PRECISION": name}) for name in ("bf16", "fp8"))
    assert fp8["gather_bytes"] == half["gather_bytes"]
    assert fp8["peak"] <= 1.05 * half["peak"]
