"""Steps of the training loop on fake cards, each with a logged row: syncs, launches, exchanges."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.conftest import Rig

pytestmark = pytest.mark.gpu_rig

ALONE = """
import json
from tests.gpu.trainings import Case, language_model, run
cases = {
    "fp32": Case(language_model(), training={"log_every": 1}),
    "bf16": Case(language_model(), training={"log_every": 1, "precision": "bf16"}),
    "fp16": Case(language_model(), training={"log_every": 1, "precision": "fp16"}),
    "compiled": Case(language_model(), training={
        "log_every": 1, "precision": "bf16", "compile": True}),
}
print(json.dumps(run(cases)))
"""


def test_a_logged_step_waits_for_no_kernel(rig: Rig, tmp_path: Path) -> None:
    folders = {"TRITON_CACHE_DIR": f"{tmp_path}/t", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/i"}
    found = rig.run(ALONE, env=folders)
    for name, counted in found.items():
        assert (counted["syncs"], counted["d2h"], counted["h2d"]) == (0, 1, 1), name  # row, batch
    assert found["fp32"]["launches"] < 700
    assert found["bf16"]["launches"] < 900
    assert found["compiled"]["launches"] < 0.7 * found["bf16"]["launches"]


TOGETHER = """
import json
from tests.gpu.trainings import Case, language_model, run
if __name__ == "__main__":
    task, training = language_model(), {"log_every": 1}
    cases = {s: Case(task, (4, 1, 8, 2), s, training) for s in ("ddp", "fsdp")}
    cases["muon"] = Case(task, (4, 1, 8, 2), "fsdp", {**training, "optimizer": "muon"})
    blocks = task.blocks(task.build_model())
    inside = [weight for block in blocks for weight in block.parameters()]
    print(json.dumps({
        **run(cases),
        "blocks": sum(weight.nbytes for weight in inside),
        "matrices": sum(weight.numel() for weight in inside if weight.ndim == 2),
    }))
"""


def test_workers_exchange_the_gradient_once(rig: Rig) -> None:
    found = rig.run(TOGETHER, cards=2)
    ddp, fsdp, blocks = found["ddp"], found["fsdp"], found["blocks"]
    whole, sums = ddp["weights"], 3 * 8  # the loss, its weight, and whether the training ends
    assert ddp["reduce_bytes"] == whole + sums
    assert (ddp["gather_bytes"], ddp["scatter_bytes"]) == (0, 0)
    # a rank gives its half of the gradient's sum, and of the weights: those of blocks twice
    assert fsdp["scatter_bytes"] == whole / 2
    assert fsdp["gather_bytes"] == (whole + blocks) / 2
    muon = found["muon"]
    for name in ("scatter_bytes", "gather_bytes"):
        assert muon[name] == fsdp[name]
    # a rank has half of each matrix, and gives half of that to the other to orthogonalize, in bf16;
    # of its half of the matrices, it gives back half of the rows
    assert muon["send_bytes"] == 2 * 2 * found["matrices"] / 4
    assert (ddp["send_bytes"], fsdp["send_bytes"]) == (0, 0)
    for counted in (ddp, fsdp, muon):
        assert counted["syncs"] == 0
        assert counted["expandable"]
