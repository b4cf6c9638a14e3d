"""Predicted memory of trials: used until measurements take its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raypipe import hardware
from raypipe.commands.configuration import read, resolve
from raypipe.config.axes import AxisSettings
from raypipe.errors import ConfigError
from raypipe.hardware import Gpu, detect
from raypipe.storage.run_directory import RunDirectory
from raypipe.sweep.memory_model import MemoryFit, MemoryModel
from raypipe.sweep.prior import Prior, predicted
from raypipe.sweep.settings import ConstraintSettings, SweepSettings
from raypipe.sweep.trials import TrialMaker

GIB = 2**30
SMALL = (
    "data.source=random", "model.vocabulary=300", "model.width=32", "model.heads=2",
    "model.layers=2", "model.feed_forward=64", "model.context=32", "train.training.steps=10",
    "train.training.warmup_steps=0", "train.training.effective_batch=16",
)  # fmt: skip


def test_a_predicted_line_rules_out_what_cannot_fit_before_any_trial() -> None:
    model = MemoryModel(10 * GIB, prior=MemoryFit(2 * GIB, GIB, 0, 0.0))
    verdict = model.verdict(16)
    assert verdict.outcome == "does_not_fit"
    assert verdict.reason.endswith("a sample (predicted from the model)")
    assert model.verdict(4).outcome == "fits"
    assert model.verdict(8).outcome == "unknown"  # at the limit
    model.observe(1, GIB)
    assert model.verdict(16).outcome == "does_not_fit"
    model.observe(4, GIB + 2**20)
    assert model.verdict(16).outcome == "fits"  # measurements decide


def test_each_group_of_trials_has_a_line_and_each_trial_a_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "missing_package", lambda precision: None)  # nor is it needed
    gpu = Gpu(0, "", "NVIDIA L4", 23034 * 2**20, "8.9")
    node = replace(detect(), gpus=(gpu,))
    configuration = resolve(read("lm_pretrain"), SMALL, "auto", [node])
    key = "train.training"
    sweep = SweepSettings(
        stage="train",
        axes={
            f"{key}.micro_batch": AxisSettings(grid=(4, 8)),
            f"{key}.precision": AxisSettings(grid=("fp32", "bf16", "fp8")),
        },
        constraints=ConstraintSettings(effective_batch=16),
    )
    given = TrialMaker(configuration, sweep, [node]).trials()
    trials = [trial for trial in given if trial.precision != "fp8"]
    assert len(given) == len(trials) + 2
    said: list[str] = []
    run = RunDirectory.at(tmp_path)
    found = predicted(given, (gpu.name, gpu.memory_bytes), run, said.append)
    assert found.fits.keys() == {trial.group for trial in trials}
    for fit in found.fits.values():
        assert fit.trials == 0
        assert 0 < fit.predict(4) <= fit.predict(8)  # the same blocks of the allocator
    assert len(said) == 2 * len(found.fits)  # recordings
    speeds = [found.speeds[trial.unit.key] for trial in found.ordered(trials)]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == len(trials)
    assert predicted(trials, ("cpu", None), run, said.append) == Prior()
    assert predicted(trials, ("Unknown", GIB), run, said.append) == Prior()
    assert Prior().ordered(trials) == trials


def test_a_step_that_needs_values_is_not_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raypipe.prediction import forecast

    def failing(*_: object) -> None:
        raise ConfigError("it needs values")

    monkeypatch.setattr(forecast, "record", failing)
    gpu = Gpu(0, "", "NVIDIA L4", 23034 * 2**20, "8.9")
    node = replace(detect(), gpus=(gpu,))
    configuration = resolve(read("lm_pretrain"), SMALL, "auto", [node])
    axes = {"train.training.micro_batch": AxisSettings(grid=(4, 8))}
    trials = TrialMaker(configuration, SweepSettings(stage="train", axes=axes), [node]).trials()
    said: list[str] = []
    given = (gpu.name, gpu.memory_bytes)
    assert predicted(trials, given, RunDirectory.at(tmp_path), said.append) == Prior()
    assert "it needs values" in said[-1]


def test_a_wrong_file_of_cards_ends_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cards.yaml").write_text("cards: [")
    monkeypatch.setenv("RAYPIPE_CARDS", str(tmp_path / "cards.yaml"))
    said: list[str] = []
    run = RunDirectory.at(tmp_path)
    assert predicted([], ("cpu", None), run, said.append) == Prior()
    assert said == []
    assert predicted([], ("NVIDIA L4", 23034 * 2**20), run, said.append) == Prior()
    assert "the trials are not predicted" in said[0]
