"""The check of a loss at the first step: what it refuses, and what passes.

That it changes nothing is asserted of restarts in test_equivalence.py: each of them checks, too.
"""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from example_tasks import Regression, job
from torch import Tensor, nn

from raypipe.errors import UnitError
from raypipe.training.loop import train
from raypipe.training.loss_check import refuse_means
from raypipe.training.parallel import ModelCall, Worker
from raypipe.training.task import Loss, StepContext

CPU = torch.device("cpu")
Batch = dict[str, Any]


def classes(model: Any, batch: Batch, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction=reduction)


def check(
    loss: Callable[[Any, Batch], Loss],
    model: nn.Module | None = None,
    samples: int = 6,
    *,
    more: Any = "a",
    **training: Any,
) -> None:
    """Check a loss on a batch of samples with 5 features and one of 3 classes."""
    asked = job(Regression(), Path("unused"), **training)
    task: Any = SimpleNamespace(loss=lambda model, batch, context: loss(model, batch))
    draw = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(samples, 5, generator=draw),
        "y": torch.arange(samples) % 3,
        "tokens": torch.arange(samples) % 4 + 1,
        "mask": None,
        "more": more,
    }
    call = ModelCall(nn.Linear(5, 3) if model is None else model)
    context = StepContext(0, asked.phases[0], 0)
    refuse_means(task, asked.settings.training, CPU, call, batch, samples, context)


MEANS: dict[str, Callable[[Any, Batch], Loss]] = {
    "samples": lambda model, b: Loss(classes(model, b, "mean"), len(b["y"])),
    "tokens": lambda model, b: Loss(
        (classes(model, b, "none") * b["tokens"]).sum() / b["tokens"].sum(), b["tokens"].sum()
    ),
    "a ratio over the batch": lambda model, b: Loss(
        1 - F.one_hot(b["y"], 3).mul(model(b["x"]).softmax(1)).sum() / len(b["y"]) ** 1.0,
        torch.tensor(len(b["y"])),
    ),
    "a metric": lambda model, b: Loss(
        classes(model, b), len(b["y"]), {"shape": (b["y"] == 0).float().mean()}
    ),
}


class Counting(nn.Linear):
    """A model that counts its calls in a buffer, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_the_buffers_of_the_model_are_as_before() -> None:
    network = Counting()
    check(PASSES["a sum"], network, samples=4)
    assert network.calls == 0


def test_the_message_has_the_values_and_what_to_write() -> None:
    def loss(model: Any, batch: Batch) -> Loss:
        return Loss(classes(model, batch, "mean") * 0 + 1.5, len(batch["y"]))

    with pytest.raises(UnitError, match="is a mean") as error:
        check(loss)
    assert error.value.message == (
        "SimpleNamespace.loss: Loss.total is a mean, but must be a sum, as Loss.weight is: "
        "2 sample(s) give 1.5 with weight 2, the same twice give 1.5 with weight 4; take "
        'reduction="sum", or return Loss.mean(mean, weight)'
    )


def contrastive(model: Any, batch: Batch) -> Tensor:
    """InfoNCE between two views; the other samples of the batch are the negatives."""
    one, other = model(batch["x"]), model(batch["x"] + 0.1)
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


PASSES: dict[str, Callable[[Any, Batch], Loss]] = {
    "a sum": lambda model, b: Loss(classes(model, b), len(b["y"])),
    "a sum over tokens, and a mean over classes": lambda model, b: Loss(
        (model(b["x"]).square().mean(1) * b["tokens"]).sum(), b["tokens"].sum()
    ),
    "a mean that says so": lambda model, b: Loss.mean(classes(model, b, "mean"), len(b["y"])),
    "a mean of weight 1": lambda model, b: Loss(classes(model, b, "mean"), 1),
    "contrastive": lambda model, b: Loss(contrastive(model, b), len(b["y"])),
    "zero": lambda model, b: Loss(classes(model, b) * 0, len(b["y"]), {"none": torch.zeros(())}),
    "NaN": lambda model, b: Loss(classes(model, b) * torch.nan, len(b["y"])),
    "random": lambda model, b: Loss(
        (classes(model, b, "none") * (torch.rand(len(b["y"])) < 0.3)).sum(), len(b["y"])
    ),
    "metrics that come and go": lambda model, b: Loss(
        classes(model, b), len(b["y"]), {f"of_{len(b['y'])}": torch.ones(())}
    ),
    "another error": lambda model, b: Loss(classes(model, b["z"]), len(b["y"])),
}  # fmt: skip


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*MEANS, *PASSES])
def test_a_mean_is_refused_and_other_losses_pass(name: str, precision: str, samples: int) -> None:
    """Also of a model with dropout and batch normalization, and with parts that are no tensors."""
    part = r"metrics\['shape'\]" if name == "a metric" else "total"
    message = rf"loss: Loss\.{part} is a mean, but must be a sum"
    drops = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    for network in (None, drops):
        with pytest.raises(UnitError, match=message) if name in MEANS else nullcontext():
            loss = (MEANS | PASSES)[name]
            check(loss, network, samples, precision=precision)


def test_a_random_loss_passes_for_any_draw() -> None:
    """Also if the second copies count nothing, so that the sum stays the same."""
    for seed in range(100):
        torch.manual_seed(seed)
        check(PASSES["random"], samples=2)


@pytest.mark.parametrize("more", [6, torch.tensor(6), torch.ones(6**2), object()])
def test_a_batch_that_cannot_be_taken_apart_is_not_judged(more: Any) -> None:
    """Such as one with the number of all samples, or a value for each pair."""
    check(MEANS["samples"], more=more)


class Mean(Regression):
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], context: StepContext) -> Loss:
        total, weight, metrics = super().loss(model, batch, context)
        return Loss(total / weight, weight, metrics)


def test_a_training_refuses_a_mean_at_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(UnitError, match=r"Mean\.loss: Loss\.total is a mean") as caught:
        train(job(Mean(), tmp_path, (4, 4, 16, 1)), Worker(0, CPU))
    assert caught.value.trace is not None
    line = Mean.loss.__code__.co_firstlineno
    assert caught.value.trace.frame == f"{__file__}:{line} in loss"
    train(replace(job(Mean(), tmp_path), measured=True), Worker(0, CPU))  # not a benchmark


def test_a_mean_that_says_so_is_its_sum() -> None:
    found = Loss.mean(torch.tensor(1.5), 4, {"mae": torch.tensor(0.5)})
    expected = [torch.tensor(6.0), 4, {"mae": torch.tensor(2.0)}]
    torch.testing.assert_close(list(found), expected)


def test_the_end_of_the_debugger_is_not_an_error_of_the_loss() -> None:
    def loss(model: Any, batch: Batch) -> Loss:
        raise BdbQuit

    with pytest.raises(BdbQuit):
        check(loss)
