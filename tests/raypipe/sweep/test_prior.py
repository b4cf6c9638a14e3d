"""Predicted memory of trials: used until measurements take its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from raypipe import hardware
from raypipe.commands.configuration import read, resolve
from raypipe.config.axes import AxisSettings
from raypipe.errors import ConfigError
from raypipe.hardware import Gpu, Hardware, detect
from raypipe.launch.inline import InlineLauncher
from raypipe.pipeline.launcher import Trials
from raypipe.prediction import forecast
from raypipe.prediction.cards import cards
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import read_table
from raypipe.sweep import stage
from raypipe.sweep.memory_model import MemoryFit, MemoryModel
from raypipe.sweep.prior import Prior, on_card, predicted
from raypipe.sweep.settings import ConstraintSettings, SweepSettings
from raypipe.sweep.trials import Trial, TrialMaker
from raypipe.training.settings import TrainStageSettings
from tests.raypipe.examples import sweeping

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
    speeds = [found.rows[trial.unit.key]["samples_per_s"] for trial in found.ordered(trials)]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == len(trials)
    assert predicted(trials, ("cpu", None), run, said.append) == Prior()
    assert predicted(trials, ("Unknown", GIB), run, said.append) == Prior()
    assert Prior().ordered(trials) == trials


def test_trainings_of_different_length_have_forecasts_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their phases differ, and with them hours and energy."""
    steps = list[int | None]()

    class Forecasts:
        def __init__(self, _: object, settings: TrainStageSettings, *__: object) -> None:
            self.length = settings.training.steps
            steps.append(self.length)

        def line(self, *_: object) -> tuple[float, float]:
            return 0.0, 1.0

        def row(self, _: object, settings: TrainStageSettings, *__: object) -> dict[str, int]:
            assert settings.training.steps == self.length
            return {}

    monkeypatch.setattr(forecast, "Forecasts", Forecasts)
    node = replace(detect(), gpus=(Gpu(0, "", "NVIDIA L4", 23034 * 2**20, "8.9"),))
    key = "train.training"
    axes = {
        f"{key}.steps": AxisSettings(grid=(10, 20)),
        f"{key}.micro_batch": AxisSettings(grid=(4, 8)),
    }
    sweep = SweepSettings(stage="train", kind="quality", metric="loss", axes=axes)
    maker = TrialMaker(resolve(read("lm_pretrain"), SMALL, "auto", [node]), sweep, [node])
    on_card(maker.trials(), cards()["L4"], None, str)
    assert sorted(steps) == [10, 20]


YAML = """
experiment: example_sweep
train: {training: {steps: 10, effective_batch: 16}}
sweep:
  stage: train
  repeats: 1
  axes: {training.micro_batch: [1, 2, 4, 8, 16]}
"""


def test_a_sweep_begins_with_the_fastest_point_and_starts_none_that_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    started: list[int] = []

    def prior(trials: Sequence[Trial], *_: object) -> Prior:
        speeds = {1: 10.0, 2: 40.0, 4: 30.0, 8: 90.0, 16: 80.0}
        rows = {t.unit.key: {"samples_per_s": speeds[t.micro_batch]} for t in trials}
        line = MemoryFit(1 * GIB, 2 * GIB, 0, 0.0)  # up to 4 samples of 10 GiB
        return Prior({trial.group: line for trial in trials}, rows)

    def run(launcher: InlineLauncher, trials: Trials, *_: object) -> None:
        while (job := trials.next()) is not None:
            started.append(job.plan.micro_batch)
            peak = GIB + 2 * GIB * job.plan.micro_batch
            trials.ended(job.trial_id, {"samples_per_s": 1.0, "gpu_peak_bytes": peak})

    monkeypatch.setattr(stage, "predicted", prior)
    monkeypatch.setattr(InlineLauncher, "trials", run)
    node = Hardware("there", 8, 2**35, (Gpu(0, "GPU-1", "Card", 10 * GIB, "9.0"),))
    sweeping.sweep(YAML, tmp_path / "run", (), node)  # the training after it needs the GPU
    assert started == [2, 4, 1]
    trials = read_table(RunDirectory.at(tmp_path / "run"), "trials").set_index("micro_batch")
    trials = trials[trials["stage"] == "sweep"]
    skipped = trials[trials["status"] == "skipped"]
    assert set(skipped.index) == {8, 16}
    assert all(reason.startswith("predicted ") for reason in skipped["reason"])


def test_a_step_that_needs_values_is_not_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
