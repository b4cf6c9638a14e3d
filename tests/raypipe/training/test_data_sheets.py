from __future__ import annotations

import pytest

from raypipe.errors import ConfigError
from raypipe.hardware import Precision, supported_precisions
from raypipe.training.data_sheets import cards, of_device, peak_flops, resolve
from tests import scenario

KNOWN = cards()
CASES = scenario.cases(__file__, "data_sheets")


@pytest.mark.parametrize(("given", "meant"), CASES["names"].items())
def test_a_card_has_short_names(given: str, meant: str) -> None:
    assert resolve(given, KNOWN).name == meant


@pytest.mark.parametrize(("given", "message"), CASES["refused"].items())
def test_a_name_of_no_card_or_several_is_refused_with_the_nearest(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(given, KNOWN)


def test_every_card_is_whole_and_plausible() -> None:
    assert len(KNOWN) > 50
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
    by_name = of_device(reported)
    assert by_name is not None
    assert by_name.peaks == found.peaks


@pytest.mark.parametrize(("name", "precision", "tflops"), CASES["peaks"])
def test_the_longest_name_counts(name: str, precision: Precision, tflops: float | None) -> None:
    """And a card whose peak is not known has none."""
    assert peak_flops(name, precision) == (tflops and tflops * 1e12)
