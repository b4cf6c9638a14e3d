"""The losses of the experiments are sums: any micro-batches give the same."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor

from experiments.lm_pretrain.training import random_task
from experiments.pabbo_lda.pabbo.curve_training import CurvePolicyTask
from experiments.pabbo_lda.pabbo.training import PabboTask
from experiments.summarization.training import RandomPairs, SummarizationTask
from experiments.teleclass.training import LongestSamples, TeleclassTask
from experiments.transformer.training import RandomSamples, TransformerTask
from raypipe.training import loader
from raypipe.training.batching import BatchPlan
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainStageSettings
from raypipe.training.task import StepContext, TrainTask
from tests.experiments.lm_pretrain.test_model import SMALL
from tests.experiments.pabbo_lda.test_training import CURVES, TINY
from tests.experiments.summarization.test_model import GATED
from tests.experiments.teleclass.test_training import SCRATCH
from tests.experiments.transformer.test_model import NGRAMS, REGRESSION, SEQUENCE, TABLE

WORKER = Worker(0, torch.device("cpu"))
NUMBERS = TABLE.model_copy(update=REGRESSION)
TASKS: dict[str, TrainTask] = {
    "burn_in": PabboTask(TINY),
    "policy": PabboTask(TINY),
    "policy as published": PabboTask(TINY.model_copy(update={"policy_gradient": "published"})),
    "curves": CurvePolicyTask(CURVES),
    "lm_pretrain": random_task(SMALL),
    "summarization": SummarizationTask(GATED, RandomPairs(23, 32, 8, 10), label_smoothing=0.1),
    "teleclass": TeleclassTask(
        SCRATCH.model_copy(update={"vectors": False}), 6, LongestSamples(24, 512, 6, 0)
    ),
    "ngrams": TransformerTask(NGRAMS, RandomSamples(NGRAMS, 50)),
    "sequence": TransformerTask(SEQUENCE, RandomSamples(SEQUENCE, 50)),
    "table": TransformerTask(NUMBERS, RandomSamples(NUMBERS, 50), deviation=2.0),
}


def sums(name: str, size: int) -> Tensor:
    """Loss, weight, metrics and gradient of a step over 8 samples, in micro-batches of a size."""
    task, phase = TASKS[name], Phase(name.partition(" ")[0], 1, 8, 1e-3)
    torch.manual_seed(0)
    model = task.build_model().double()
    batches = loader.batches(
        task, [phase], TrainStageSettings(), BatchPlan(size, 8 // size, 8, 1), WORKER, 0
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
