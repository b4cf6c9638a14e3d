"""Predicted memory next to what torch's CUDA allocator reserves for the same training."""

from __future__ import annotations

import pytest

from raypipe.cards.dry_run import StepCase, record
from raypipe.cards.peak_memory import peak_parts
from raypipe.training.data_sheets import cards
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import TrainTask
from tests.gpu.trainings import stages

pytestmark = pytest.mark.gpu_rig

#: on Hopper torch takes cuDNN's attention, which the rig does not have
CARD = cards()["A100 SXM 80GB"]
#: a block of this size may be reserved sooner or later
SEGMENT = 20 * 2**20
SIZES = ["model.vocabulary=4096", "model.width=256", "model.layers=4", "model.feed_forward=768"]
TRAININGS = {
    "lm_pretrain": ["data.source=random", *SIZES, "model.heads=8", "model.context=512"],
    "transformer": ["data.source=random", "model.numeric=8"],
    "teleclass": [],
}

TRAIN = """
from tests.gpu.trainings import train
from tests.gpu.test_prediction import of_workload
found = train("t", *of_workload(*given))["reserved"]
"""


def of_workload(
    name: str, accumulation: int, checkpointing: bool
) -> tuple[TrainTask, TrainStageSettings]:
    given = TRAININGS[name], CARD.memory_bytes, str(CARD.capability)
    (_, task, settings), *_ = stages(name, "auto", *given)
    return task, settings.changed(
        "training", steps=2, epochs=None, warmup_steps=0, compile=False, precision="bf16",
        gradient_checkpointing=checkpointing, micro_batch=8, effective_batch=8 * accumulation,
    )  # fmt: skip


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", TRAININGS)
def test_the_predicted_memory_is_what_cuda_reserves(rig, name, accumulation, checkpointing):
    given = name, accumulation, checkpointing
    reserved = rig.run(TRAIN, given, name="NVIDIA A100-SXM4-80GB", capability="8.0")
    task, settings = of_workload(*given)
    phase = task.phases(settings.training, 8 * accumulation)[0]
    recording = record(task, StepCase(settings, phase, 0, 8, accumulation, 1, CARD.capability))
    predicted = peak_parts(recording, hopper=False, bucketed=False).total()
    assert predicted == pytest.approx(reserved, rel=0.03, abs=SEGMENT)
