from __future__ import annotations

from collections.abc import Sequence

import pytest

from raypipe.cards.recorder import Kernel, Recording
from raypipe.cards.speed import Factors, StepTime, step_time, watts
from raypipe.hardware import Precision
from raypipe.training.data_sheets import Card

CARD = Card.model_validate(
    {
        **{"name": "Card", "reports": "card", "memory_mib": 2**14, "bandwidth": 1000, "link": 100},
        **{"tflops": {"fp32": 10, "tf32": 20, "bf16": 40, "fp16": 40}},
        **{"power_w": 200.0, "capability": 8.0, "source": ""},
    }
)
WHOLE = Factors(1.0, 0.5, 1.0, 1.0, 1e-6)
PRODUCT = Kernel("mm", flops=4e10, bytes=16, dtype="bfloat16")
SUM = Kernel("add", bytes=3 * 10**9)


def recording(first: Sequence[Kernel], update: Sequence[Kernel] = ()) -> Recording:
    return Recording(kernels={"first": list(first), "update": list(update)})


SINGLE = Kernel("mm", flops=4e10, dtype="float32")
ATTENTION = Kernel("_flash_attention_forward", flops=4e10, dtype="bfloat16")


@pytest.mark.parametrize(
    ("kernels", "precision", "seconds"),
    [
        # operations or bytes, whichever takes longer
        ([PRODUCT], "bf16", 1e-3),
        ([SUM], "bf16", 3e-3),
        ([PRODUCT, SUM], "bf16", 4e-3),
        ([ATTENTION], "bf16", 2e-3),  # it reaches a smaller part of the peak
        # products in single precision use tensor cores with tf32 alone
        ([SINGLE], "fp32", 4e-3),
        ([SINGLE], "tf32", 2e-3),
    ],
)
def test_the_time_of_kernels(
    kernels: Sequence[Kernel], precision: Precision, seconds: float
) -> None:
    found = step_time(recording(kernels), CARD, precision, 1, WHOLE).seconds
    assert found == pytest.approx(seconds, rel=0.01)


def test_many_small_kernels_take_the_time_of_the_host() -> None:
    small = [Kernel("add", bytes=8)] * 1000
    slow = Factors(1.0, 1.0, 1.0, 1.0, 1e-4)
    found = step_time(recording(small), CARD, "bf16", 1, slow)
    assert found.seconds == pytest.approx(0.1, rel=0.01)
    assert found.busy_s < 0.01


def test_the_host_waits_for_a_value() -> None:
    value = Kernel("_local_scalar_dense", waits=True)
    slow = Factors(1.0, 1.0, 1.0, 1.0, 2e-3)
    behind = step_time(recording([SUM, SUM]), CARD, "bf16", 1, slow).seconds
    waited = step_time(recording([SUM, value, SUM]), CARD, "bf16", 1, slow).seconds
    assert waited == pytest.approx(behind + 2e-3, rel=0.01)


def test_each_micro_batch_takes_its_time_and_the_update_once() -> None:
    found = recording([SUM], [SUM])
    found.kernels["further"] = [SUM, SUM]
    one = step_time(found, CARD, "bf16", 1, WHOLE).seconds
    four = step_time(found, CARD, "bf16", 4, WHOLE).seconds
    assert one == pytest.approx(6e-3, rel=0.01)
    assert four == pytest.approx(one + 3 * 6e-3, rel=0.01)


def test_gradients_are_exchanged_behind_the_backward_pass() -> None:
    hidden, shown = (
        Recording([(1, size)], {1: "gradients"}, {"first": [SUM] * 10, "update": []}, span=(0, 1))
        for size in (10**9, 10**10)
    )
    alone = step_time(hidden, CARD, "bf16", 1, WHOLE).seconds
    assert step_time(hidden, CARD, "bf16", 1, WHOLE, replicas=2).seconds == alone
    both = step_time(shown, CARD, "bf16", 1, WHOLE, replicas=2).seconds  # 0.1 s over the link
    assert both == pytest.approx(0.1 + alone / 3, rel=0.01)


def test_a_busy_card_takes_its_whole_power() -> None:
    assert watts(CARD, StepTime(1.0, 1.0)) == 200.0
    assert watts(CARD, StepTime(1.0, 0.0)) == 60.0
