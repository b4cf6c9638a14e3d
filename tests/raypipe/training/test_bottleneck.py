"""What bounds the speed: a clock that only the rehearsed work moves."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import Regression, job
from safetensors.torch import load as load_tensors
from torch import nn

from raypipe.storage import tables as results
from raypipe.training import bottleneck
from raypipe.training.bottleneck import Diagnosis, candidates, diagnose, needed
from raypipe.training.job import TrainingJob, Worker
from raypipe.training.loop import train
from raypipe.training.settings import LoaderSettings

CPU = torch.device("cpu")


class Machine:
    """Computing takes 10 s a micro-batch, an exchange 4 s, loading 12 s shared by processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: int = 1, load_s: float = 12.0):
        self.now, self.load_s, self.closed = 0.0, load_s, 0
        self.passes: list[bool] = []
        self.exchange_s = 4.0 if workers > 1 else 0.0
        monkeypatch.setattr(bottleneck.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(bottleneck.parallel, "gather", lambda value, workers: [value, 0.0])

    def load(self, processes: int) -> Generator[int, None, None]:
        ready, index = self.now, 0
        try:
            while True:
                index += 1
                # processes work while the model computes, one batch after the other
                ready = (self.now if processes == 0 else ready) + self.load_s / max(1, processes)
                self.now = max(self.now, ready)
                yield index
        finally:
            self.closed += 1

    def run(self, batch: int, exchange: bool) -> None:
        self.passes.append(exchange)
        self.now += 10.0 + self.exchange_s * exchange


def test_the_fewest_processes_that_keep_up_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    found = diagnose(machine.load, machine.run, [0, 1, 2, 4], 2, 3, Worker(0, CPU))
    assert found == Diagnosis(2, 30.0, 0.0, 0.0)  # one process needs 12 s for each 10 s
    assert found.bound == "compute"
    assert machine.closed == 4  # the synthetic batch, and 0, 1 and 2 processes


def test_a_loader_that_never_keeps_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, load_s=100.0)
    found = diagnose(machine.load, machine.run, [0, 1, 2], 2, 1, Worker(0, CPU))
    assert (found.loader_workers, found.loader_s, found.bound) == (2, 40.0, "loader")
    assert str(found).startswith("loader-bound with 2 loader processes: a step takes 1e+04 ms of")


@pytest.mark.parametrize(("accumulation", "bound"), [(1, "communication"), (4, "compute")])
def test_the_exchange_is_paid_once_a_step(
    monkeypatch: pytest.MonkeyPatch, accumulation: int, bound: str
) -> None:
    machine = Machine(monkeypatch, workers=2, load_s=0.0)
    found = diagnose(machine.load, machine.run, [0], 2, accumulation, Worker(0, CPU, 2))
    assert found == Diagnosis(0, 10.0 * accumulation, 4.0, 0.0)
    assert found.bound == bound


def test_a_sharded_model_exchanges_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, each worker would keep the whole gradient, which may not fit."""
    machine = Machine(monkeypatch, workers=2, load_s=0.0)
    found = diagnose(machine.load, machine.run, [0], 2, 4, Worker(0, CPU, 2), sharded=True)
    assert all(machine.passes)
    assert found == Diagnosis(0, 56.0, None, 0.0)
    assert "5.6e+04 ms of computing and communication, 0 ms of waiting" in str(found)


def test_what_is_tried() -> None:
    assert candidates(2, 1) == [0, 1, 2]
    assert candidates(64, 8) == [0, 1, 2, 4, 8]
    assert candidates(1, 4) == [0, 1]
    assert needed([0, 1, 2], 3) == 2 * 3 + 11


class Normed(Regression):
    """With dropout and a batch normalization, whose statistics a measurement must not move."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(*super().build_model(), nn.BatchNorm1d(1)).to(self.dtype)


@pytest.mark.parametrize("steps", [6, 60])  # too short to measure, and long enough
def test_measuring_before_the_run_changes_nothing(tmp_path: Path, steps: int) -> None:
    def run(folder: str, loader: LoaderSettings) -> tuple[TrainingJob, dict[str, Any], list[Any]]:
        said: list[Any] = []
        task = Normed(dropout=0.2)
        asked = job(task, tmp_path / folder, (8, 2, 16, 1), loader=loader, steps=steps)
        return asked, train(asked, Worker(0, CPU), said.append), said

    plain, _, _ = run("plain", LoaderSettings(workers=0))
    measured, outcome, said = run("measured", LoaderSettings(workers="auto"))
    texts = [text for text in said if isinstance(text, str) and "loader" in text]
    assert len(texts) == 1
    short = steps == 6
    assert (("longer run" in texts[0]), outcome["bound"] is None) == (short, short)
    one, other = (results.read_table(j.run_dir, "steps")["loss"] for j in (plain, measured))
    assert list(one) == list(other)
    stored = [load_tensors(j.run_dir.read(j.run_dir.model("fit"))) for j in (plain, measured)]
    assert all(torch.equal(value, stored[1][name]) for name, value in stored[0].items())
