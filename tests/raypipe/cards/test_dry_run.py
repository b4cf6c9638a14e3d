"""Recordings and forecasts against arithmetic: all of a small model is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from raypipe.cards.dry_run import StepCase, record
from raypipe.cards.forecast import Forecasts
from raypipe.cards.peak_memory import between, peak_parts
from raypipe.cards.recorder import Recording, living
from raypipe.errors import ConfigError
from raypipe.training.data_sheets import cards
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from raypipe.training.task import Loss, StepContext, TrainTask

WIDTH, HIDDEN = 64, 256
WEIGHTS = 4 * 2 * WIDTH * HIDDEN


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Squares(TrainTask):
    """Two layers; the loss is the sum of squared outputs."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(Block())

    def build_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.randn(64, WIDTH))

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        return list(model.children())

    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


class Looks(Squares):
    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        kept = batch[0][batch[0][:, 0].nonzero()[:, 0]]
        return Loss(model(kept).square().sum(), 1)


def settings(**training: Any) -> TrainStageSettings:
    return TrainStageSettings(training=TrainingSettings(steps=2, **training))


def case(size: int = 32, capability: float | None = 9.0, **training: Any) -> StepCase:
    return StepCase(settings(**training), Phase("train", 2, size, 1e-3), 0, size, 2, 1, capability)


def held(recording: Recording, part: str) -> int:
    """The bytes of a part before the update of the step."""
    found = living(recording.events[: recording.span[1]])
    return sum(size for number, size in found.items() if recording.parts.get(number) == part)


def test_weights_gradients_and_state_have_their_sizes() -> None:
    found = record(Squares(), case())
    assert held(found, "parameters") == WEIGHTS
    assert found.gradient_bytes == WEIGHTS
    assert held(found, "optimizer") == pytest.approx(2 * WEIGHTS, abs=64)
    in_buckets = found.in_buckets().events[: found.span[1]]
    assert "gradients" not in {found.parts.get(number) for number in living(in_buckets)}


def test_operations_are_those_of_the_products() -> None:
    size = 32
    forward = 2 * size * WIDTH * HIDDEN * 2
    found = record(Squares(), case(size))
    # the gradient of the input is not needed
    assert found.flops == 3 * forward - forward / 2
    assert sum(kernel.flops for kernel in found.kernels["further"]) == found.flops
    recomputed = record(Squares(), case(size, gradient_checkpointing=True))
    assert recomputed.flops == found.flops  # of the model: each operation once
    done = sum(kernel.flops for kernel in recomputed.kernels["first"])
    assert done == found.flops + forward / 2  # the block's output is not needed again


def test_products_are_in_the_precision_of_autocast() -> None:
    for precision, dtype in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        found = record(Squares(), case(precision=precision))
        products = [kernel for kernel in found.kernels["first"] if kernel.flops]
        assert {kernel.dtype for kernel in products} == {dtype}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_third_micro_batch_lies_on_the_line_through_two(precision: str) -> None:
    one, two, three = (record(Squares(), case(size, precision=precision)) for size in (8, 16, 48))
    found = between(one, two, (48 - 8) / (16 - 8))
    assert found is not None
    assert found.events == three.events
    assert found.flops == three.flops
    assert [k.bytes for k in found.kernels["first"]] == [k.bytes for k in three.kernels["first"]]


def test_shards_are_parts_of_weights_and_state() -> None:
    sharded = settings().changed("scaling", workers=4, strategy="fsdp")
    found = record(Squares(), replace(case(), settings=sharded, workers=4))
    assert held(found, "optimizer") == pytest.approx(2 * WEIGHTS / 4, abs=64)
    assert any(kernel.exchanged for kernel in found.kernels["first"])
    assert not torch.distributed.is_initialized()


def test_a_step_that_needs_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Looks: cannot be predicted.*measure it on the card"):
        record(Looks(), case())


class Attends(Squares):
    """Attention and dropout in a block: on a CPU they are other kernels than on a card."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, batch_first=True))

    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        return Loss(model(batch[0][:, None, :]).square().sum(), len(batch[0]))


def test_recomputed_functions_follow_the_same_rules() -> None:
    found = record(Attends(), case(precision="bf16", gradient_checkpointing=True))
    names = [kernel.name for kernel in found.kernels["first"]]
    assert names.count("_scaled_dot_product_flash_attention") == 2
    assert names.count("_scaled_dot_product_flash_attention_backward") == 1


@pytest.mark.parametrize(
    ("capability", "precision", "kernel"),
    [(9.0, "bf16", "flash"), (9.0, "fp32", "efficient"), (7.0, "fp16", "efficient")],
)
def test_attention_is_the_kernel_that_the_card_has(
    capability: float, precision: str, kernel: str
) -> None:
    found = record(Attends(), case(capability=capability, precision=precision))
    names = {each.name for each in found.kernels["first"]}
    assert f"_scaled_dot_product_{kernel}_attention" in names


def test_autocast_keeps_norms_in_single_precision() -> None:
    found = record(Attends(), case(precision="bf16"))
    norms = [each for each in found.kernels["first"] if each.name == "native_layer_norm"]
    values, parameters = 32 * WIDTH, 2 * WIDTH + 2 * 32  # weight and bias, mean and deviation
    assert {each.bytes for each in norms} == {4 * (2 * values + parameters)}


def test_the_logarithm_of_a_sum_of_exponentials_needs_a_copy_of_its_input() -> None:
    """torch's function is a single operator, which frees the copy before it returns."""

    class Sums(Squares):
        def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
            return Loss(model(batch[0]).repeat(1, 1000).logsumexp(1).sum(), len(batch[0]))

    events = record(Sums(), case()).events
    assert 4 * 32 * WIDTH * 1000 in {
        size for (one, size), end in pairwise(events) if end == (one, 0)
    }


CARD = cards()["A100 SXM 80GB"]


def test_operations_of_the_model_count_once_in_the_utilization() -> None:
    given = [settings(precision="bf16", gradient_checkpointing=on) for on in (False, True)]
    forecasts = Forecasts(Squares(), given[0], 64, lambda _: None)
    rows = [forecasts.row(CARD, each, 64) for each in given]
    flops = [row["mfu"] * row["step_time_s"] for row in rows]
    assert flops[1] == pytest.approx(flops[0], rel=1e-9)
    assert rows[1]["mfu"] < rows[0]["mfu"]  # as the speed


class Chunks(Squares):
    """A loss in chunks of 16 samples: the number of kernels depends on the micro-batch."""

    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        parts = [model(part).square().sum() for part in batch[0].split(16)]
        return Loss(torch.stack(parts).sum(), len(batch[0]))


def test_micro_batches_that_differ_in_more_than_sizes_are_recorded() -> None:
    size = 256
    asked: dict[str, Any] = {"precision": "bf16", "gradient_checkpointing": True}
    given = settings(**asked)
    forecasts = Forecasts(Chunks(), given, size, lambda _: None)
    for each in (1, 16, 48, size):
        own = replace(case(each, 8.0, **asked), accumulation=1 if each == size else 2)
        step = record(Chunks(), own)
        reserved = peak_parts(step, hopper=False, bucketed=False).total()
        assert forecasts.row(CARD, given, each)["peak_bytes"] == reserved
