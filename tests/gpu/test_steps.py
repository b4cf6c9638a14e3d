"""Steps on fake cards: syncs, launches, exchanged bytes and memory."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu_rig

TRAIN = """
from tests.gpu import trainings
found = trainings.measured(given)
"""

LOGGED = {"log_every": 1}
#: micro-batch, accumulation, effective batch and workers
TWO = (4, 1, 8, 2)


def test_a_logged_step_waits_for_no_kernel(rig):
    kinds = {name: {"precision": name} for name in ("fp32", "bf16", "fp16")}
    kinds["compiled"] = {"precision": "bf16", "compile": True}
    cases = {name: {"training": LOGGED | kind} for name, kind in kinds.items()}
    found = rig.run(TRAIN, cases)
    for name, counted in found.items():
        assert (counted["syncs"], counted["d2h"], counted["h2d"]) == (0, 1, 1), name  # row, batch
    assert found["fp32"]["launches"] < 700
    assert found["bf16"]["launches"] < 900
    assert found["compiled"]["launches"] < 0.7 * found["bf16"]["launches"]


def test_workers_exchange_the_gradient_once(rig):
    kinds = {"ddp": ("ddp", {}), "fsdp": ("fsdp", {}), "muon": ("fsdp", {"optimizer": "muon"})}
    cases = {
        name: {"plan": TWO, "strategy": strategy, "training": LOGGED | training}
        for name, (strategy, training) in kinds.items()
    }
    found = rig.run(TRAIN, cases, cards=2)
    ddp, fsdp, blocks = found["ddp"], found["fsdp"], found["ddp"]["blocks"]
    whole, sums = ddp["weights"], 3 * 8  # the loss, its weight, and whether the training ends
    assert ddp["reduce_bytes"] == whole + sums
    assert (ddp["gather_bytes"], ddp["scatter_bytes"]) == (0, 0)
    # a rank gives its half of the gradient's sum, and of the weights: those of blocks twice
    assert fsdp["scatter_bytes"] == whole / 2
    assert fsdp["gather_bytes"] == (whole + blocks) / 2
    muon = found["muon"]
    assert muon["scatter_bytes"] == fsdp["scatter_bytes"]
    # a rank gives its half of the momentum of each matrix, in bf16, once
    assert muon["gather_bytes"] == fsdp["gather_bytes"] + 2 * muon["matrices"] / 2
    for counted in (ddp, fsdp, muon):
        assert counted["syncs"] == 0
        assert counted["expandable"]


def test_no_card_keeps_the_whole_gradient_and_bf16_halves_what_is_gathered(rig):
    plans = {"plain": TWO, "half": (2, 2, 8, 2), "accumulating": (4, 2, 16, 2)}
    cases = {
        f"{strategy} {name}": {"plan": plan, "strategy": strategy}
        for name, plan in plans.items()
        for strategy in ("ddp", "fsdp")
    }
    for name in ("plain", "half"):
        cases[f"fsdp {name} bf16"] = cases[f"fsdp {name}"] | {"training": {"precision": "bf16"}}
    found = rig.run(TRAIN, cases, cards=2)
    fsdp, more = found["fsdp plain"], found["fsdp accumulating"]
    assert found["fsdp half"]["peak"] <= fsdp["peak"]
    # the gradient has a memory pool of its own, that of the stream that reduces it: it is reserved
    # with and without accumulation, also where it is larger than half of the activations (bf16)
    assert found["fsdp half"]["reserved"] <= fsdp["reserved"]
    assert found["fsdp half bf16"]["reserved"] <= found["fsdp plain bf16"]["reserved"]
    # the next micro-batch finds half of the gradient on each card, not all of it
    assert more["peak"] <= fsdp["peak"] + 0.55 * fsdp["weights"]
    assert more["scatter_bytes"] == 2 * fsdp["scatter_bytes"]
    assert more["gather_bytes"] == 2 * fsdp["gather_bytes"]
    # DDP arranges its buckets anew in the second step, when they may hold a gradient
    assert found["ddp accumulating"]["peak"] <= found["ddp plain"]["peak"] + 1.05 * fsdp["weights"]
    assert found["ddp accumulating"]["reduce_bytes"] == found["ddp plain"]["reduce_bytes"]
    half = found["fsdp plain bf16"]
    assert half["gather_bytes"] < 0.55 * fsdp["gather_bytes"]  # embeddings stay in fp32
    assert half["scatter_bytes"] == fsdp["scatter_bytes"]  # gradients are reduced in fp32
    for each in found.values():
        assert each["expandable"]
        assert each["syncs"] == 0


def test_half_precision_keeps_no_copies_of_recomputed_blocks(rig):
    """At micro-batch 1 the copies are larger than the activations that bf16 saves."""
    half, recomputed = {"precision": "bf16"}, {"gradient_checkpointing": True}
    kinds = {"fp32": recomputed, "bf16": recomputed | half, "copies": half, "plain": {}}
    cases = {name: {"plan": (1, 4, 4, 1), "training": kind} for name, kind in kinds.items()}
    found = rig.run(TRAIN, cases)
    assert found["bf16"]["peak"] <= 1.01 * found["fp32"]["peak"]  # one block's copies
    assert found["copies"]["peak"] > found["plain"]["peak"]
    assert found["plain"]["expandable"]


POLICY = """
import torch
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
    now = counters()
    return now["launches"] - now["gemms"]

def launches(trajectories):
    for _ in range(2):
        before = kernels()
        log_probs, _ = trajectories(model, candidates, samples, 0, settings)
        log_probs.sum().backward()
    return kernels() - before

found = {
    "per step": launches(training._trajectories),
    "at once": launches(training._trajectories_at_once),
}
"""


def test_the_gradient_of_all_duels_is_one_pass(rig):
    found = rig.run(POLICY)
    assert found["at once"] < 0.4 * found["per step"]


STEPS = """
import torch
from torch import nn
from raypipe.training.optimizer import build
from raypipe.training.settings import TrainingSettings
from tests.gpu.rig.counters import counters

def block():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))

def step(optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = counters()
    optimizer.step()
    after = counters()
    return {name: after[name] - before[name] for name in ("syncs", "launches", "h2d", "d2h")}

model = nn.Sequential(nn.Embedding(100, 64), *(block() for _ in range(10)), nn.Linear(64, 100))
model.to("cuda")
found = {"parameters": len(list(model.parameters()))}
for name in ("adamw", "adafactor", "muon"):
    training = TrainingSettings(optimizer=name, weight_decay=0.1)
    optimizer = build(model, list(model)[1:-1], training)
    step(optimizer)
    found[name] = step(optimizer)
torchs = torch.optim.Adafactor(model.parameters(), weight_decay=0.1)
step(torchs)
found["torch"] = step(torchs)
"""


def test_no_optimizer_waits_for_the_card(rig):
    found = rig.run(STEPS)
    weights = found["parameters"]
    for optimizer in ("adamw", "adafactor", "muon"):
        counted = found[optimizer]
        assert (counted["syncs"], counted["d2h"], counted["h2d"]) == (0, 0, 0), optimizer
    assert found["torch"]["syncs"] == 2 * weights
    assert found["adafactor"]["launches"] < found["torch"]["launches"]


@pytest.mark.parametrize(("compiled", "limit", "launches"), [(False, 25.5, 3000), (True, 22, 1675)])
def test_the_medium_language_model_fits_with_a_loss_in_chunks(rig, compiled, limit, launches):
    """32 x 2 sequences of 2048 tokens in bf16; with the plain loss it is 43 GiB."""
    training = {"precision": "bf16", "compile": compiled}
    chunks = {"model": "medium", "plan": (32, 2, 64, 1), "training": training}
    whole = {} if compiled else {"one chunk": chunks | {"chunk": 2**40}}
    found = rig.run(TRAIN, {"chunks": chunks, **whole})
    assert found["chunks"]["reserved"] < limit * 2**30
    assert found["chunks"]["launches"] <= launches
    if whole:
        assert found["one chunk"]["peak"] > found["chunks"]["peak"] + 6 * 2**30
