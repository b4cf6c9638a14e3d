"""The parts of the task by themselves."""

import torch
from digits import EXPERIMENT, Digits, DigitsSettings


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


def test_a_few_steps_of_gradient_descent_lower_the_loss():
    torch.manual_seed(0)
    task = Digits(width=32)
    model, batch = task.build_model(), task.build_dataset()[:200]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = task.loss(model, batch, None).total.item()
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(model, batch, None).total.backward()
        optimizer.step()
    assert task.loss(model, batch, None).total.item() < before / 2


def test_the_experiment_has_one_stage():
    assert [stage.name for stage in EXPERIMENT.stages(DigitsSettings())] == ["train"]
