"""Kernels of a policy step of PABBO, without matrix products."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import Rig

pytestmark = pytest.mark.gpu_rig

SCRIPT = """
import json, torch
from experiments.pabbo_lda.pabbo import training
from experiments.pabbo_lda.pabbo.functions import Candidates, draw_pairs
from experiments.pabbo_lda.pabbo.model import LARGE, PabboModel
from experiments.pabbo_lda.pabbo.training import PabboSettings
from tests.gpu.rig.counters import counters

settings = PabboSettings(model=LARGE, horizon=64, query_points=100)
model, samples = PabboModel(LARGE).cuda(), torch.arange(4, device="cuda")
values = torch.zeros(4, 100, device="cuda")
candidates = Candidates.of(values, values, draw_pairs(0, 0, samples, 100, 256))

def kernels():
    return counters["launches"] - counters["gemms"]

def launches(trajectories):
    for _ in range(2):
        before = kernels()
        log_probs, _ = trajectories(model, candidates, samples, 0, settings)
        log_probs.sum().backward()
    return kernels() - before

print(json.dumps({
    "per step": launches(training._trajectories),
    "at once": launches(training._trajectories_at_once),
}))
"""


def test_the_gradient_of_all_duels_is_one_pass(rig: Rig) -> None:
    found = rig.run(SCRIPT)
    assert found["at once"] < 0.4 * found["per step"]
