"""The losses of the experiments are sums: any micro-batches give the same; means are refused."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.lm_pretrain.model import LmSettings
from experiments.lm_pretrain.training import random_task
from experiments.pabbo_lda.pabbo.curve_training import CurvePolicySettings, CurvePolicyTask
from experiments.pabbo_lda.pabbo.curves import CurveSettings
from experiments.pabbo_lda.pabbo.model import PabboModelSettings
from experiments.pabbo_lda.pabbo.training import PabboSettings, PabboTask
from experiments.summarization.model import T5Settings
from experiments.summarization.training import RandomPairs, SummarizationTask
from experiments.teleclass.settings import ClassifierSettings
from experiments.teleclass.training import LongestSamples, TeleclassTask
from experiments.transformer.settings import NgramSettings, TransformerSettings
from experiments.transformer.training import RandomSamples, TransformerTask
from raypipe.training import loader
from raypipe.training.batching import BatchPlan
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import StepContext, TrainTask

WORKER = Worker(0, torch.device("cpu"))
SMALL: dict[str, Any] = {"hidden": 16, "heads": 2, "layers": 1, "dropout": 0.0}
WIDTHS = PabboModelSettings(d_model=8, heads=2, layers=1, feed_forward=8)
PABBO = PabboSettings(
    model=WIDTHS, trajectories=3, horizon=4, query_points=9, candidate_pairs=12,
    prediction_points=8, prediction_duels=10, prediction_splits=3, max_context=4,
)  # fmt: skip
CURVES = CurvePolicySettings(
    model=WIDTHS, curves=CurveSettings(t_max=(60, 60), start=(2, 4)), points=59, steps=6
)
T5 = T5Settings(
    vocabulary=40, width=16, head_width=8, heads=2, feed_forward=16, layers=1, dropout=0.0
)
LM = LmSettings(vocabulary=11, width=12, heads=3, layers=1, feed_forward=10, context=9, dropout=0.0)
SEQUENCE = TransformerSettings(vocabulary=12, length=10, outputs=3, **SMALL)
NGRAMS = SEQUENCE.model_copy(update={"ngrams": NgramSettings(most=11, width=4)})
TABLE = TransformerSettings(numeric=4, categories=(3,), outputs=1, kind="regression", **SMALL)
BERT = ClassifierSettings(vocabulary=512, length=10, vectors=False, **SMALL)
TASKS: dict[str, TrainTask] = {
    "burn_in": PabboTask(PABBO),
    "policy": PabboTask(PABBO),
    "policy by improvement": PabboTask(
        PABBO.model_copy(update={"policy_gradient": "expected_improvement"})
    ),
    "curves": CurvePolicyTask(CURVES),
    "lm_pretrain": random_task(LM),
    "summarization": SummarizationTask(T5, RandomPairs(40, 32, 8, 10), label_smoothing=0.1),
    "teleclass": TeleclassTask(BERT, 6, LongestSamples(10, 512, 6, 0)),
    "ngrams": TransformerTask(NGRAMS, RandomSamples(NGRAMS, 50)),
    "sequence": TransformerTask(SEQUENCE, RandomSamples(SEQUENCE, 50)),
    "table": TransformerTask(TABLE, RandomSamples(TABLE, 50), deviation=2.0),
}


def phase_of(name: str) -> str:
    return name.partition(" ")[0]


def sums(name: str, size: int) -> Tensor:
    """Loss, weight, metrics and gradient of a step over 8 samples, in micro-batches of a size."""
    task, phase = TASKS[name], Phase(phase_of(name), 1, 8, 1e-3)
    torch.manual_seed(0)
    model = task.build_model().double()
    batches = loader.batches(
        task, [phase], TrainStageSettings(), BatchPlan(size, 8 // size, 8, 1), WORKER
    )
    values: dict[str, float] = {}
    for batch in islice(batches, 8 // size):
        loss = task.loss(model, batch, StepContext(0, phase, 7))
        loss.total.backward()
        for key, value in {"": loss.total.detach(), "weight": loss.weight, **loss.metrics}.items():
            values[key] = values.get(key, 0.0) + float(value)
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([torch.tensor([*values.values()], dtype=torch.float64), *gradients])


@pytest.mark.parametrize("name", TASKS)
def test_any_micro_batches_have_the_same_sums_and_gradient(name):
    whole = sums(name, 8)
    assert whole.norm() > 0
    for size in (4, 1):
        torch.testing.assert_close(sums(name, size), whole, rtol=1e-6, atol=1e-8)
