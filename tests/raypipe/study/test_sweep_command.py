"""``raypipe sweep`` with schedulers of Ray Tune: populations, and trials that pause."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pandas as pd
import pytest

from raypipe.launch.cluster import RayLauncher
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import RunDirectory
from tests.command import EXAMPLES, Ended, in_process, start, table, until
from tests.raypipe.examples.example_sweep import HELD

CONFIG = """
experiment: example_sweep
train: {training: {steps: 40, effective_batch: 16, learning_rate: 0.01, log_every: 1}}
sweep: {stage: train, kind: quality, metric: eval_loss}
"""
#: at the same step all are compared, so that it is known which ones are the bad ones
POPULATION = (
    "sweep.axes.training.learning_rate=[0.05, 1e-6, 1e-7, 1e-8]",
    "sweep.scheduler={name: pbt, perturbation_interval: 4, resample_probability: 0, synch: true}",
    *("train.training.steps=8", "train.training.micro_batch=16"),
)
WAIT_S = 400

pytestmark = pytest.mark.slow  # `launch/test_tune.py` has fast ones on Tune


def given(folder: Path, *arguments: str) -> tuple[str, ...]:
    """The command in a folder of its own."""
    (folder / "c.yaml").write_text(CONFIG)
    return ("sweep", "c.yaml", "--run-dir", "run", *arguments)


def sweep(launcher: RayLauncher, folder: Path, *arguments: str) -> Ended:
    """The command in this process, on the tests' cluster."""
    environment = {"RAYPIPE_CACHE": str(folder / "cache")}
    with contextlib.chdir(folder):
        return in_process(launcher, *given(folder, *arguments), environment=environment)


def finished(folder: Path) -> dict[str, Row]:
    """The rows of the trials that are finished, without what later trials decide."""
    ledger = Ledger.to_read(RunDirectory.at(folder / "run"))
    rows = ledger.items("trials")
    return {key: {**row, "parity": None} for key, row in rows if ledger.get("units", key)}


def test_bad_trials_of_a_population_go_on_from_a_good_one(launcher, tmp_path):
    ended = sweep(launcher, tmp_path, *POPULATION)
    assert ended.status == 0, ended.output
    rows, lr = table(tmp_path / "run", "trials").set_index("trial_id"), "learning_rate"
    assert list(rows["status"]) == ["succeeded"] * 4
    steps = table(tmp_path / "run", "steps").set_index("trial_id")
    changed = rows[rows["settings_history"].notna()]
    assert len(changed) >= 1
    assert (rows.drop(changed.index)[lr].notna()).all()
    for trial, text in changed["settings_history"].items():
        first, *later = json.loads(text)
        assert first == {"step": 0, lr: 0.05}
        # a rate at the end of its list may stay as it is
        rates = {each[lr] for each in (first, *later)}
        assert pd.isna(rows.loc[trial, lr]) if len(rates) > 1 else rows.loc[trial, lr] == 0.05
        assert [each["step"] for each in later] == [4] * len(later)
        source, own = steps.loc[later[0]["from"]].iloc[:4], steps.loc[trial]
        assert list(own["step"]) == list(range(1, 9))  # its rows are those of its model
        assert list(own["loss"].iloc[:4]) == list(source["loss"])
        rate = own["lr"].iloc[4] / steps.loc[later[0]["from"], "lr"].iloc[4]
        assert rate == pytest.approx(later[-1][lr] / 0.05)
        assert Path(RunDirectory.at(tmp_path / "run").model(trial)).exists()


def test_a_population_that_was_killed_trains_no_stored_trial_again(launcher, tmp_path):
    # a Ray of its own; each step takes half a second
    environment = {"PYTHONPATH": str(EXAMPLES), "RAYPIPE_CACHE": str(tmp_path / "cache")}
    environment[HELD] = "16"
    process = start(tmp_path, *given(tmp_path, *POPULATION), environment=environment)
    until(lambda: finished(tmp_path), "a trial ends", WAIT_S, process)
    process.kill()
    process.communicate(timeout=WAIT_S)
    before = finished(tmp_path)
    assert len(before) < 4
    ended = sweep(launcher, tmp_path, *POPULATION)
    assert ended.status == 0, ended.output
    after = finished(tmp_path)
    assert {key: after[key] for key in before} == before
    assert list(table(tmp_path / "run", "trials")["status"]) == ["succeeded"] * 4
    assert "nothing to do" in sweep(launcher, tmp_path, *POPULATION).output


def test_hyperband_pauses_trials_and_stops_the_bad_ones(launcher, tmp_path):
    """Two trials are in a bracket without halving; of the next three, one goes on."""
    rates = "sweep.axes.training.learning_rate=[0.05, 0.02, 1e-8, 0.01, 1e-7]"
    band = "sweep.scheduler={name: hyperband, reduction_factor: 6}"
    ended = sweep(launcher, tmp_path, rates, band, "train.training.steps=6")
    assert ended.status == 0, ended.output
    rows = table(tmp_path / "run", "trials").set_index("learning_rate")
    expected = {0.05: 6, 0.02: 6, 0.01: 6, 1e-7: 1, 1e-8: 1}
    assert rows["steps"].to_dict() == expected
    assert set(rows["reason"].dropna()) == {"stopped early by hyperband"}
    found = table(tmp_path / "run", "steps").groupby("trial_id")["step"].apply(list)
    assert found.to_dict() == {
        row["trial_id"]: list(range(1, expected[rate] + 1)) for rate, row in rows.iterrows()
    }
