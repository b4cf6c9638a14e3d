"""Replays of allocations and the time of kernels, on cards with round numbers; listed cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from raypipe.cards.allocator import replay
from raypipe.cards.recorder import Kernel, Recording
from raypipe.cards.speed import Factors, StepTime, step_time, watts
from raypipe.errors import ConfigError
from raypipe.hardware import Precision, supported_precisions
from raypipe.training.data_sheets import Card, cards, of_device, peak_flops, resolve
from tests import scenario

KNOWN, CASES = cards(), scenario.cases(__file__, "tables")
PEAKS: dict[Precision, float] = {"fp32": 1e13, "tf32": 2e13, "bf16": 4e13, "fp16": 4e13}
CARD = Card("Card", "card", 2**34, 1e12, PEAKS, 1e11, 200.0, 8.0)
WHOLE = Factors(1.0, 0.5, 1.0, 1.0, 1e-6)
SUM = Kernel("add", bytes=3 * 10**9)


def recording(first: Sequence[Kernel], update: Sequence[Kernel] = ()) -> Recording:
    return Recording(kernels={"first": list(first), "update": list(update)})


@pytest.mark.parametrize("case", CASES["times"])
def test_the_time_of_kernels(case: dict[str, Any]) -> None:
    kernels = [Kernel(**kernel) for kernel in case["kernels"]] * case.get("times", 1)
    factors = replace(WHOLE, launch_s=case.get("launch_s", 1e-6))
    found = step_time(recording(kernels), CARD, case["precision"], 1, factors)
    expected = case["seconds"], case.get("busy_s", case["seconds"])
    assert (found.seconds, found.busy_s) == pytest.approx(expected, rel=0.01)


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


def in_bytes(mebibytes: int, more: int = 0) -> int:
    return mebibytes * 2**20 + more


@pytest.mark.parametrize(("events", "allocated", "reserved"), CASES["allocations"])
def test_the_most_that_is_allocated_and_reserved(
    events: list[list[int]], allocated: list[int], reserved: int
) -> None:
    peak = replay((number, in_bytes(*size)) for number, *size in events)
    assert (peak.allocated, peak.reserved) == (in_bytes(*allocated), in_bytes(reserved))


def test_the_event_of_a_peak_is_its_first() -> None:
    assert replay([(1, 40), (1, 0), (2, 40)]).event == 0


@pytest.mark.parametrize(("given", "meant"), CASES["names"].items())
def test_a_card_has_short_names(given: str, meant: str) -> None:
    assert resolve(given, KNOWN).name == meant


@pytest.mark.parametrize(("given", "message"), CASES["refused"].items())
def test_a_name_of_no_card_or_several_is_refused_with_the_nearest(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(given, KNOWN)


def test_every_card_is_whole_and_plausible() -> None:
    assert len(KNOWN) > 50
    assert Card("T4", *CASES["t4"]) == KNOWN["T4"]
    for card in KNOWN.values():
        assert 8 * 2**30 - 2**25 < card.memory_bytes < 200 * 2**30, card.name
        assert 2.5e11 < card.bandwidth < 9e12, card.name
        assert 60 < card.power_w <= 1200, card.name
        assert set(card.peaks) == set(supported_precisions(str(card.capability)))
        assert resolve(card.name, KNOWN) == card


@pytest.mark.parametrize(("reported", "mebibytes", "meant"), CASES["devices"])
def test_a_device_is_a_card(reported: str, mebibytes: int, meant: str) -> None:
    found = of_device(reported, mebibytes * 2**20)
    assert found is not None
    assert found.name == meant
    assert {precision: peak_flops(reported, precision) for precision in found.peaks} == found.peaks


@pytest.mark.parametrize(("name", "precision", "tflops"), CASES["peaks"])
def test_the_longest_name_counts(name: str, precision: Precision, tflops: float | None) -> None:
    """And a card whose peak is not known has none."""
    assert peak_flops(name, precision) == (tflops and tflops * 1e12)


def test_a_cpu_needs_no_data_sheet() -> None:
    cards.cache_clear()
    assert peak_flops("cpu", "fp32") is None
    assert cards.cache_info().currsize == 0
