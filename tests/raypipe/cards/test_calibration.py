from __future__ import annotations

import pytest

from raypipe.cards import calibration
from raypipe.cards.calibration import Calibration, Measurement
from raypipe.store.run_directory import cache_directory


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))


def test_a_card_without_measurements_is_uncalibrated() -> None:
    assert calibration.load("L4") == Calibration()
    assert calibration.load("L4").text == "predicted, uncalibrated"


def test_the_median_of_all_trainings_corrects_the_speed_and_the_largest_the_memory() -> None:
    calibration.save("L4", [Measurement(key="a", speed=0.5, memory=1.1)])
    calibration.save(
        "L4", [Measurement(key="b", speed=0.7), Measurement(key="c", speed=0.9, memory=1.0)]
    )
    found = calibration.load("L4")
    assert (found.number, found.speed, found.memory) == (3, 0.7, 1.1)
    assert found.speed_range == (0.5, 0.9)
    assert found.text == "predicted, calibrated by 3 measurement(s)"
    assert calibration.load("L40") == Calibration()


def test_the_newest_measurement_of_a_training_counts() -> None:
    calibration.save("L4", [Measurement(key="a", speed=0.5)])
    calibration.save("L4", [Measurement(key="a", speed=0.8)])
    found = calibration.load("L4")
    assert (found.number, found.speed) == (1, 0.8)
    low, high = found.speed_range or (0, 0)
    assert low < 0.8 < high


def test_a_damaged_file_is_reported_and_counts_as_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calibration.save("L4", [Measurement(key="a", speed=0.5)])
    (cache_directory() / "cards" / "L4.json").write_text("{")
    assert calibration.load("L4") == Calibration()
    assert "damaged" in caplog.text
    calibration.save("L4", [Measurement(key="b", speed=0.6)])
    assert calibration.load("L4").number == 1
