from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from raypipe.hardware import bytes_text
from raypipe.sweep.memory_model import Measurements, MemoryModel

GIB = 2**30
sizes = st.integers(1, 512)
peaks = st.integers(1, 200 * GIB)
#: (micro-batch, peak), or None for out of memory
trials = st.lists(st.tuples(sizes, st.none() | peaks), max_size=6)


def model(
    found: list[tuple[int, int | None]],
    capacity: int | None = None,
    preset: Measurements | None = None,
) -> MemoryModel:
    made = MemoryModel(capacity, preset=preset or Measurements())
    for size, peak in found:
        if peak is None:
            made.ran_out(size)
        else:
            made.observe(size, peak)
    return made


def line(static: float, slope: float, sizes: tuple[int, ...]) -> list[tuple[int, int | None]]:
    return [(size, int((static + slope * size) * GIB)) for size in sizes]


@given(st.floats(0, 30), st.floats(0.001, 3), st.sets(sizes, min_size=2, max_size=6))
def test_a_line_is_found(static: float, slope: float, measured: set[int]) -> None:
    made = model(line(static, slope, tuple(measured)))
    fit = made.fit()
    assert fit is not None
    assert fit.trials == len(measured)
    assert fit.largest_error < 1e-5  # peaks are whole bytes
    for size in (1, 7, 1000):
        assert made.predict(size) == pytest.approx((static + slope * size) * GIB, rel=1e-3, abs=1e4)


@given(st.dictionaries(sizes, peaks, min_size=2, max_size=6))
def test_the_fit_is_the_bounded_weighted_least_squares(found: dict[int, int]) -> None:
    fit = model(list(found.items())).fit()
    assert fit is not None
    x, y = np.array(sorted(found.items()), dtype=float).T
    weights = 1 / (y + 400 * 2**20)

    def loss(static: float, slope: float) -> float:
        return float(np.sum((weights * (static + slope * x - y)) ** 2))

    reference = lsq_linear(
        weights[:, None] * np.stack([np.full_like(x, GIB), x * GIB], axis=1),
        weights * y,
        bounds=(0, np.inf),
        tol=1e-14,
    )
    assert fit.static_bytes >= 0
    assert fit.bytes_per_sample >= 0
    assert loss(fit.static_bytes, fit.bytes_per_sample) <= loss(*(reference.x * GIB)) + 1e-9
    errors = [abs(fit.predict(size) / peak - 1) for size, peak in found.items()]
    assert fit.largest_error == pytest.approx(max(errors))


@given(trials, st.integers(1, 200 * GIB), sizes, st.randoms(use_true_random=False))
def test_the_order_does_not_matter(found, capacity, size, random) -> None:
    shuffled = found.copy()
    random.shuffle(shuffled)
    one, other = model(found, capacity), model(shuffled, capacity)
    assert one.verdict(size) == other.verdict(size)
    assert one.fit() == other.fit()
    assert one.largest_micro_batch() == other.largest_micro_batch()


@given(trials, trials, st.integers(1, 200 * GIB))
def test_verdicts_agree_with_each_other_and_with_what_was_measured(found, before, capacity) -> None:
    made = model(found, capacity, preset=model(before).measured)
    outcomes = [made.verdict(size).outcome for size in range(1, 513)]
    rank = {"fits": 0, "unknown": 1, "does_not_fit": 2}
    assert outcomes == sorted(outcomes, key=rank.__getitem__)
    largest = max((size for size, peak in found if peak is not None), default=0)
    assert set(outcomes[:largest]) <= {"fits"}
    for size in (size for size, peak in found if peak is None and size > largest):
        assert set(outcomes[size - 1 :]) == {"does_not_fit"}
    if (best := made.largest_micro_batch()) is not None:
        assert best >= largest
        assert made.verdict(best).outcome != "does_not_fit"
        limit = made.limit_bytes
        assert limit is not None
        after = made.predict(best + 1)
        assert after is not None
        assert after > limit * (1 - 1e-9) or made.failed_micro_batch == best + 1


def test_the_boundary_is_tried_and_what_is_beyond_is_not() -> None:
    made = model(line(3.2, 1.3, (1, 2, 4)), int(39.4 * GIB))
    assert made.verdict(26).outcome == "fits"  # 37.0 GiB
    assert made.verdict(27).outcome == "unknown"  # 38.3 GiB
    assert made.verdict(29).outcome == "unknown"  # 40.9 GiB
    verdict = made.verdict(32)
    assert verdict.outcome == "does_not_fit"
    assert verdict.reason == (
        "predicted 44.8 GiB of 39.4 GiB: 3.2 GiB + 1.3 GiB a sample (fit to 3 trials)"
    )
    assert verdict.predicted_bytes == pytest.approx(44.8 * GIB)
    assert made.largest_micro_batch() == 27


def test_a_wrong_prediction_is_corrected_by_the_next_trial() -> None:
    made = model([(1, 8 * GIB), (2, 12 * GIB)], 40 * GIB)
    assert made.verdict(12).outcome == "does_not_fit"
    made.observe(8, 18 * GIB)  # far less than predicted
    assert made.verdict(12).outcome == "fits"
    assert made.verdict(8).reason == "micro-batch 8 with the same settings fits"


def test_running_out_rules_out_what_was_predicted_to_fit() -> None:
    made = model(line(2, 1, (2, 4)), 80 * GIB)
    assert made.verdict(32).outcome == "fits"
    made.ran_out(32)
    for size in (32, 33, 64):
        verdict = made.verdict(size)
        assert verdict.outcome == "does_not_fit"
        assert verdict.reason == "micro-batch 32 with the same settings ran out of memory"
    assert made.verdict(31).outcome == "unknown"
    assert made.verdict(16).outcome == "fits"
    assert made.limit_bytes == pytest.approx(34 * GIB)
    assert made.failed_micro_batch == 32
    assert made.largest_micro_batch() == 31


def test_a_success_contradicts_smaller_failures() -> None:
    made = model([*line(2, 1, (2, 4)), (8, None), (16, 18 * GIB)], 80 * GIB)
    assert made.failed_micro_batch is None
    assert made.verdict(8).outcome == "fits"
    assert made.verdict(32).outcome == "fits"
    made.ran_out(24)
    assert made.verdict(16).outcome == "fits"
    assert made.verdict(24).outcome == "does_not_fit"


def test_without_enough_measurements_only_failures_decide() -> None:
    made = model([(4, GIB), (4, 2 * GIB), (16, None)], 80 * GIB)
    assert made.fit() is None
    assert made.predict(8) is None
    assert made.largest_micro_batch() is None
    assert [made.verdict(size).outcome for size in (2, 4, 8, 16)] == [
        "fits", "fits", "unknown", "does_not_fit",
    ]  # fmt: skip
    assert MemoryModel(None).verdict(1).outcome == "unknown"


def test_without_a_capacity_nothing_is_ruled_out_by_the_fit() -> None:
    made = model(line(2, 1, (2, 4)))
    assert made.verdict(10**6).outcome == "unknown"
    assert made.verdict(10**6).predicted_bytes == pytest.approx((2 + 10**6) * GIB)
    assert made.largest_micro_batch() is None


def test_memory_that_does_not_grow_has_no_largest_micro_batch() -> None:
    made = model([(1, GIB), (2, GIB), (4, GIB)], 2 * GIB)
    assert made.largest_micro_batch() is None
    assert made.verdict(10**6).outcome == "fits"
    made.ran_out(8)
    assert made.largest_micro_batch() == 7


def test_of_equal_micro_batches_the_largest_peak_counts() -> None:
    found = [*line(2, 1, (2, 4)), (4, 5 * GIB), (2, 3 * GIB)]
    assert model(found).fit() == model(line(2, 1, (2, 4))).fit()


def test_small_batches_count_as_much_as_large_ones() -> None:
    """With absolute errors the 3 % that the largest peak is off would be a third of the first."""
    exact = dict(line(2, 1, (1, 2, 4, 64)))
    made = model([(1, exact[1]), (2, exact[2]), (4, exact[4]), (64, int(exact[64] * 1.03))])
    predicted = made.predict(1)
    assert predicted == pytest.approx(exact[1], rel=0.02)
    absolute = np.polyfit(list(exact), [*list(exact.values())[:3], exact[64] * 1.03], 1)
    assert np.polyval(absolute, 1) == pytest.approx(exact[1], rel=0.05)


def test_a_preset_gives_way_to_what_is_measured() -> None:
    preset = Measurements({2: 4 * GIB, 4: 6 * GIB, 32: 34 * GIB}, frozenset({64}))
    made = model([], 80 * GIB, preset)
    fit = made.fit()
    assert fit is not None
    assert (fit.trials, fit.static_bytes) == (3, pytest.approx(2 * GIB))
    assert made.verdict(65).reason == (
        "micro-batch 64 with the same settings ran out of memory in an earlier run"
    )
    # it is worth another trial: the fit does not rule it out
    assert made.verdict(64).outcome == "unknown"
    made.observe(64, 66 * GIB)
    assert made.failed_micro_batch is None
    made.ran_out(100)
    assert made.verdict(100).reason == "micro-batch 100 with the same settings ran out of memory"

    made = model([(32, None)], 80 * GIB, preset)
    assert made.verdict(32).outcome == "does_not_fit"
    assert made.measured == Measurements({}, frozenset({32}))
    assert model([(2, 5 * GIB)], 80 * GIB, preset).predict(2) != fit.predict(2)


@given(trials, trials)
def test_corrected_measurements_keep_all_of_the_newer_that_counts(old, new) -> None:
    newer = model(new).measured
    merged = model(old).measured.corrected_by(newer)
    assert merged.peaks.items() >= newer.peaks.items()
    if newer.failed_micro_batch is not None:
        failed = merged.failed_micro_batch
        assert failed is not None
        assert failed <= newer.failed_micro_batch
    largest = max(newer.peaks, default=0)
    assert all(size > largest for size in merged.failed)
    assert merged.corrected_by(newer) == merged


@pytest.mark.parametrize("peak", [0, -1, math.nan, math.inf])
def test_what_is_no_measurement_is_refused(peak: float) -> None:
    made = MemoryModel(GIB)
    with pytest.raises(ValueError, match="peak_bytes = "):
        made.observe(1, peak)  # type: ignore[arg-type]
    for size, use in itertools.product((0, -4), (made.ran_out, made.verdict)):
        with pytest.raises(ValueError, match="micro_batch = "):
            use(size)
    assert made.measured == Measurements()


def test_settings_of_the_model_are_checked() -> None:
    with pytest.raises(ValueError, match="capacity_bytes = 0"):
        MemoryModel(0)
    with pytest.raises(ValueError, match="margin = 1"):
        MemoryModel(None, margin=1)


def test_bytes_for_a_reader() -> None:
    found = [bytes_text(size) for size in (0, 10_000, 212 * 2**20, 1023 * 2**20, 80 * GIB)]
    assert found == ["0 MiB", "0.00954 MiB", "212 MiB", "1.0 GiB", "80.0 GiB"]
