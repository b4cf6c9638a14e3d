"""One of two workers on GPUs runs out of memory, then both."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu_rig

ONE_FULL = """
import json, tempfile
from dataclasses import replace
from pathlib import Path
import torch
import torch.distributed as dist
from raypipe.launch import training as group
from raypipe.launch.cluster import RayLauncher
from raypipe.training.recovery import train_to_the_end
from tests.gpu.rig.objects import exchange_by_store
from tests.raypipe.launch.test_train import Regression, job

class Full(Regression):
    def build_model(self):
        exchange_by_store()
        return super().build_model()

    def loss(self, model, batch, context):
        one, both = len(batch[0]) > 4 and dist.get_rank() == 1, len(batch[0]) in (3, 4)
        if context.step == 1 and (one or both):
            torch.empty(10**12, dtype=torch.uint8, device="cuda")
        return super().loss(model, batch, context)

def launch(job):
    return launcher.train(job, lambda row: None)

def on_failure(job, error, outcome):
    failures.append((error.kind, error.limit.size, outcome))

made = job(Path(tempfile.mkdtemp()), 8, 1, 2, steps=2)
scaling = made.settings.scaling.model_copy(update={"gpus_per_worker": 1.0, "cpus_per_worker": 0.5})
settings = made.settings.model_copy(update={"scaling": scaling})
failures, launcher = [], RayLauncher()
classified, classify = [], group.group_failure

def of_ray(unit, error, nodes):
    classified.append(str(error))
    return classify(unit, error, nodes)

group.group_failure = of_ray
last, outcome = train_to_the_end(replace(made, task=Full(), settings=settings), launch, on_failure)
launcher.close()
print(json.dumps({
    "failures": failures, "steps": outcome["steps"], "classified": classified
}))
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
    # the worker said it itself: Ray's report comes six seconds later
    assert found["classified"] == []
