"""Throughput on a clock of the test's own."""

from __future__ import annotations

import pytest
import torch

from raypipe.training import history
from raypipe.training.history import Throughput


def test_what_is_no_training_and_the_warm_up_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(history.time, "perf_counter", lambda: now)
    found = Throughput(torch.device("cpu"))
    assert found.summary()["samples_per_s"] is None
    for steps, seconds, between in ((2, 50.0, 0.0), (3, 2.0, 0.5), (4, 3.0, 0.0)):
        for _ in range(steps):
            found.start()  # of a training that is going: nothing changes
            now += seconds
            found.waited(seconds / 4)
            found.count(16)
        assert found.cut().steps == steps
        found.pause()
        now += 1000.0  # an evaluation, a checkpoint
        found.start()
        now += between  # another stretch of the next interval
        found.pause()
        now += 1000.0
    assert [interval.seconds for interval in found.intervals] == pytest.approx([100.0, 6.0, 12.5])
    assert found.summary() == {
        "samples_per_s": pytest.approx(16 * 7 / 18.5),
        "step_time_s": pytest.approx(18.5 / 7),
        "loader_wait_share": pytest.approx((6.0 + 12.0) / 4 / 18.5),
    }


def test_phases_of_different_cost_are_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typical speed has the median of each phase, without its first interval."""
    now = 0.0
    monkeypatch.setattr(history.time, "perf_counter", lambda: now)
    found = Throughput(torch.device("cpu"))
    for phase, times in (("burn_in", [9.0, 1.0, 1.0]), ("policy", [70.0, 10.0, 10.0, 400.0])):
        for seconds in times:
            found.start()
            now += seconds
            found.count(16)
            found.cut(phase)
    found.pause()
    typical = found.summary(typical=True)
    # 3 steps of 1 s and 4 steps of 10 s: one disturbance and both warm-ups do not count
    assert typical["samples_per_s"] == pytest.approx(16 * 7 / 43)
    assert typical["step_time_s"] == pytest.approx(43 / 7)
    mean = found.summary()
    assert mean["samples_per_s"] == pytest.approx(16 * 6 / 492)
