"""The parts of the task by themselves."""

import torch
from digits import Digits


def test_the_loss_is_a_sum_over_the_samples():
    task = Digits(width=16)
    model, data = task.build_model(), task.build_dataset()
    batch = data[:8]
    both = task.loss(model, batch, None)
    halves = [
        task.loss(model, [part[at] for part in batch], None) for at in (range(4), range(4, 8))
    ]
    assert both.weight == 8
    torch.testing.assert_close(both.total, sum(half.total for half in halves))


def test_held_out_digits_are_not_trained_on():
    task = Digits(width=16)
    assert (len(task.build_dataset()), len(task.build_eval_dataset())) == (1500, 297)
