"""Declared tables of the main job against the rows that it writes."""

from __future__ import annotations

import torch

from experiments.pabbo_lda.pabbo.curve_training import CurvePolicySettings, CurvePolicyTask
from experiments.pabbo_lda.pabbo.training import PabboSettings, PabboTask
from experiments.pabbo_lda.tables import STEP_METRICS
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import StepContext


def test_metrics_of_the_trainings_are_declared():
    small = TrainingSettings(steps=4)
    tiny = {"query_points": 9, "candidate_pairs": 12, "horizon": 4, "policy_batch": 2}
    evaluation = {"functions": 2, "steps": 2, "query_points": 9, "candidate_pairs": 12}
    found = set()
    for task in (
        PabboTask(PabboSettings.model_validate({**tiny, "evaluation": evaluation})),
        CurvePolicyTask(CurvePolicySettings(held_out=4, steps=2)),
    ):
        model = task.build_model()
        for phase in task.phases(small, 2):
            batch = torch.arange(2)
            found |= task.loss(model, batch, StepContext(0, phase, 0)).metrics.keys()
        measures = task.evaluate(model, torch.device("cpu"), 2)
        found |= {f"eval_{name}" for name in measures}
    assert found == {column.name for column in STEP_METRICS}
