from __future__ import annotations

import torch

from experiments.lm_pretrain.model import LmSettings
from experiments.lm_pretrain.training import random_task
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext

SMALL = LmSettings(vocabulary=11, width=12, heads=3, layers=2, feed_forward=10, context=9)
CONTEXT = StepContext(0, Phase("train", 1, 8, 1e-3), 0)


def test_the_loss_sums_what_each_next_token_costs() -> None:
    task = random_task(SMALL)
    model, batch = task.build_model().double(), torch.stack([task.data[i] for i in range(3)])
    loss = task.loss(model, batch, CONTEXT)
    probabilities = model(batch[:, :-1]).softmax(2)
    expected = -sum(
        probabilities[row, position, batch[row, position + 1]].log()
        for row in range(3)
        for position in range(SMALL.context)
    )
    torch.testing.assert_close(loss.total, expected)
    assert loss.total.dtype == torch.float64
    assert (loss.weight, task.counts) == (3 * SMALL.context, "tokens")
