from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pynvml
import pytest
import torch

from raypipe import process_tree
from raypipe.hardware import Gpu
from raypipe.training import history
from raypipe.training import telemetry as module
from raypipe.training.history import Throughput
from raypipe.training.telemetry import combine
from tests.command import until
from tests.scenario import cases

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
UUID = "GPU-aaaa0000"
Telemetry = partial(module.Telemetry, rank=0, attempt=1)


class Card:
    """One fake GPU behind NVML, and the clock; samples are taken only when a test asks."""

    def __init__(self) -> None:
        self.at = 100.0
        self.util = self.watts = self.memory = 0
        self.counter = 5_000
        self.open = 0

    def pass_time(self, seconds: float, util: int = 0) -> None:
        self.at += seconds
        self.util = util
        self.counter += round(1000 * self.watts * seconds)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()

    def opened(step: int) -> None:
        card.open += step

    replaced: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: opened(1),
        "nvmlShutdown": lambda: opened(-1),
        "nvmlDeviceGetHandleByUUID": lambda uuid: {UUID: "handle"}[uuid],
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=card.util),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=card.memory),
        "nvmlDeviceGetPowerUsage": lambda _: 1000 * card.watts,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: card.counter,
    }

    for name, function in replaced.items():
        monkeypatch.setattr(pynvml, name, function)
    properties = SimpleNamespace(name="NVIDIA H200", uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 77)
    monkeypatch.setattr(module, "perf_counter", lambda: card.at)
    monkeypatch.setattr(module, "_PERIOD_S", 1e6)
    return card


@pytest.mark.parametrize(("lost", "memory"), cases(__file__, "tables")["unsupported"])
def test_what_a_card_does_not_support_is_null_and_the_rest_is_there(
    card: Card, monkeypatch: pytest.MonkeyPatch, lost: list[str], memory: int | None
) -> None:
    unsupported = Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
    for name in lost:
        monkeypatch.setattr(pynvml, f"nvml{name}", unsupported)
    card.memory = 12
    with Telemetry("small", CUDA) as telemetry:
        card.pass_time(0.05)  # too short to tell the utilization of the CPU
    assert card.open == 0
    (row,) = telemetry.rows()
    assert (row["gpu_uuid"], row["memory_bytes"]) == (UUID, memory)
    assert row["util"] is row["power_w"] is row["cpu_util"] is None
    summary = telemetry.summary()
    unknown = {name for name, value in summary.items() if value is None}
    assert unknown >= {"gpu_util_mean", "energy_j"}
    assert summary["gpu_memory_used_peak_bytes"] == memory
    assert (summary["gpu_peak_bytes"], summary["device"]) == (77, "NVIDIA H200")


def test_the_gpu_of_another_program_is_sampled(card: Card) -> None:
    card.watts, gpu = 100, Gpu(3, UUID, "NVIDIA H200", 2**37, "9.0")
    with Telemetry("small", CPU, program=os.getpid(), gpu=gpu) as telemetry:
        card.memory = 5 * 10**9
        card.pass_time(2.0, util=50)
        telemetry.summary()
        card.memory = 0
    summary = telemetry.summary()
    assert (summary["device"], summary["gpu_uuid"]) == ("NVIDIA H200", UUID)
    assert summary["gpu_peak_bytes"] == summary["gpu_memory_used_peak_bytes"] == 5 * 10**9
    assert summary["energy_j"] == pytest.approx(200)
    assert card.open == 0


def test_another_program_and_its_descendants_count(card: Card) -> None:
    held = "import sys; held = bytearray(80_000_000); print(flush=True); sys.stdin.read()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])"
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **piped) as child:
        child.stdout.readline()
        with Telemetry("small", CPU, program=child.pid) as telemetry:
            card.pass_time(1.0)
    assert 80_000_000 < telemetry.summary()["host_peak_bytes"] < 160_000_000
    assert telemetry.rows()[-1]["rss_bytes"] > 80_000_000


def test_means_leave_the_warm_up_out_and_the_energy_does_not(card: Card) -> None:
    card.watts, card.memory = 500, 9 * 10**9
    with Telemetry("small", CUDA, rank=3, attempt=2) as telemetry:
        card.pass_time(8.0, util=10)
        assert telemetry.summary()["gpu_util_mean"] == 10
        telemetry.steady()
        assert telemetry.summary()["gpu_util_mean"] == 10  # there is nothing else yet
        card.watts = 200
        for util in (60, 100):
            card.pass_time(1.0, util=util)
            telemetry.summary()
    summary = telemetry.summary()
    assert summary["gpu_util_mean"] == pytest.approx((60 + 100) / 2)
    assert [row["warmup"] for row in telemetry.rows()] == [True, False, False]
    assert telemetry.rows()[0].items() >= {
        "trial_id": "small", "rank": 3, "attempt": 2, "gpu_uuid": UUID,
        "util": 10.0, "memory_bytes": 9 * 10**9, "power_w": 500.0,
    }.items()  # fmt: skip
    assert card.open == 0
    card.pass_time(9.0)  # after the end
    assert telemetry.summary()["energy_j"] == summary["energy_j"]
    assert combine([summary])["energy_j"] == pytest.approx(8 * 500 + 2 * 200)


def test_rows_are_thinned_and_peaks_not(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ROWS", 8)
    with Telemetry("small", CUDA) as telemetry:
        for number in range(100):
            card.memory = number if number != 33 else 10**6  # no kept row has the 33rd
            card.pass_time(1.0, util=number)
            telemetry.summary()
    assert [row["util"] for row in telemetry.rows()] == [0, 16, 32, 48, 64, 80, 96]
    assert telemetry.summary()["gpu_memory_used_peak_bytes"] == 10**6


def test_a_sample_that_fails_costs_neither_the_training_nor_the_next(
    card: Card, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Telemetry("small", CUDA) as telemetry:
        with monkeypatch.context() as broken:
            broken.setattr(pynvml, "nvmlDeviceGetMemoryInfo", Mock(side_effect=OSError))
            for _ in range(3):
                card.pass_time(1.0)
                telemetry.summary()
        assert telemetry.rows() == []
        card.watts = 10
        card.pass_time(1.0)
    assert len(telemetry.rows()) == 1
    assert telemetry.summary()["energy_j"] == pytest.approx(10)
    assert len(caplog.records) == 1  # said once


def test_a_busy_cpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PERIOD_S", 0.12)

    def busy() -> bool:
        sum(range(1_000_000))
        return any((row["cpu_util"] or 0) > 0 for row in telemetry.rows())

    with Telemetry("small", CPU) as telemetry:
        until(busy, "a busy CPU", 400)
        assert "telemetry" in {thread.name for thread in threading.enumerate()}
        telemetry.steady()
    rows, summary = telemetry.rows(), telemetry.summary()
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}
    assert summary["host_peak_bytes"] >= rows[0]["rss_bytes"] > 0
    assert summary["cpu_util_mean"] > 0
    assert (summary["device"], summary["gpu_uuid"]) == ("cpu", None)


def test_the_time_of_a_child_that_ended_is_counted(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where /proc hides the processes of others."""
    monkeypatch.setattr(process_tree, "_children", lambda _: [])
    code = "import time\nwhile time.process_time() < 0.3: pass"
    with Telemetry("small", CPU) as telemetry:
        telemetry.steady()
        subprocess.run([sys.executable, "-c", code], check=True)  # no sample while it runs
        card.pass_time(1.0)
    # percent of the second that passed
    assert 100 * 0.3 - 2 <= telemetry.summary()["cpu_util_mean"] < 100


@pytest.mark.parametrize("case", cases(__file__, "tables")["combined"])
def test_combine_counts_a_gpu_once(case: dict[str, Any]) -> None:
    alone = dict.fromkeys(case["summary"]) | {"device": "cpu", "gpu_uuid": None}
    summaries = [alone | given for given in case["of"]]
    assert combine(summaries) == case["summary"]


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
