"""``raypipe sweep`` as a user runs it: ended in the middle, continued, with faults."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from raypipe.launch.cluster import RayLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests import command
from tests.command import EXAMPLES, Ended, until
from tests.raypipe.examples import sweeping
from tests.raypipe.examples.example_sweep import HELD

CONFIG = """
experiment: example_sweep
train: {training: {steps: 40, effective_batch: 16, learning_rate: 0.01, log_every: 5}}
sweep:
  stage: train
  steps: 400
  warmup_steps: 50
  repeats: 2
  axes:
    training.micro_batch: [2, 4, 8]
    training.precision: [fp32, bf16]
    training.accumulation: [1, 2]
"""
WAIT_S = 400


def given(folder: Path, *arguments: str) -> tuple[str, ...]:
    """The command in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "c.yaml").write_text(CONFIG)
    return ("sweep", "c.yaml", "--run-dir", "run", *arguments)


def start(folder: Path, *arguments: str, held: str = "") -> subprocess.Popen[str]:
    """The command with a Ray of its own; the user's experiment is found by PYTHONPATH."""
    environment = {"PYTHONPATH": str(EXAMPLES), "RAYPIPE_CACHE": str(folder / "cache"), HELD: held}
    # what a terminal does: Ctrl-C is for the whole group
    return command.start(
        folder, *given(folder, *arguments), environment=environment, start_new_session=True
    )


def end(process: subprocess.Popen[str]) -> Ended:
    output, _ = process.communicate(timeout=WAIT_S)
    return Ended(process.returncode, output)


def sweep(launcher: RayLauncher, folder: Path, *arguments: str, faults: str = "") -> Ended:
    """The command in this process, on the tests' cluster."""
    environment = {"RAYPIPE_CACHE": str(folder / "cache"), "RAYPIPE_FAULTS": faults}
    arguments = given(folder, *arguments)
    with contextlib.chdir(folder):
        return command.in_process(launcher, *arguments, environment=environment)


def table(folder: Path, name: str) -> pd.DataFrame:
    return read_table(RunDirectory.at(folder / "run"), name)


def trials(folder: Path) -> pd.DataFrame:
    """What a disturbed sweep must share with an undisturbed one."""
    columns = ["trial_id", "status", "steps", "loss_final", "parity", "attempts", "point"]
    rows = sweeping.with_points(RunDirectory.at(folder / "run"))
    return rows[columns].sort_values("trial_id").reset_index(drop=True)


def curves(folder: Path) -> pd.DataFrame:
    """The loss of each logged step by trial; fails where a step is there twice."""
    return table(folder, "steps").pivot(index="step", columns="trial_id", values="loss")


def recorded(folder: Path) -> list[Mapping[str, Any]]:
    """The whole lines of the ledger, while it is written too."""
    lines = b"".join(file.read_bytes() for file in sorted((folder / "run/ledger").glob("*")))
    return [json.loads(line) for line in lines.split(b"\n")[:-1]]


def finished(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The rows of the trials that are finished."""
    lines = recorded(folder)
    units = {line["key"] for line in lines if line["table"] == "units"}
    rows = {line["key"]: line["row"] for line in lines if line["table"] == "trials"}
    return {key: row for key, row in rows.items() if key in units}


def processes(folder: Path) -> list[str]:
    """What still runs of the commands in this folder, by an environment variable of theirs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAYPIPE_CACHE") == str(folder / "cache"):
                found.append(f"{process.pid} {process.name()}")
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def whole(launcher, tmp_path_factory) -> Path:
    """An undisturbed sweep."""
    folder = tmp_path_factory.mktemp("whole")
    ended = sweep(launcher, folder)
    assert ended.status == 0, ended.output
    assert "recommended: micro_batch=" in ended.output
    before = finished(folder)
    again = sweep(launcher, folder)
    assert "nothing to do" in again.output
    assert "training" in again.output  # the recommendation is shown once more
    assert finished(folder) == before
    return folder


@pytest.mark.slow
def test_a_sweep_ended_at_three_moments_is_as_one_that_was_not(launcher, whole, tmp_path):
    draw = random.Random(7)
    before: dict[str, Mapping[str, Any]] = {}
    for done, ending in ((2, signal.SIGKILL), (6, signal.SIGTERM), (15, signal.SIGKILL)):
        # eight trials are of smaller micro-batches: it cannot end before the signal
        process = start(tmp_path, held="8" if ending == signal.SIGTERM else "")
        until(lambda done=done: len(finished(tmp_path)) >= done, "trials end", WAIT_S, process)
        time.sleep(draw.uniform(0, 0.5))
        assert len(processes(tmp_path)) > 1
        process.send_signal(ending)
        ended = end(process)
        if ending == signal.SIGTERM:
            assert ended.status == 130, ended.output
            assert "interrupted; finished units are kept" in ended.output
            assert "Continue with: raypipe sweep c.yaml --run-dir " in ended.output
            assert "Traceback" not in ended.output
            status = table(tmp_path, "stages").set_index("stage")["status"]
            assert status["sweep"] == "interrupted"
        else:
            assert ended.status == -signal.SIGKILL
        assert_kept(before, tmp_path)
        before = finished(tmp_path)
        assert len(before) < 2 * 12
    ended = sweep(launcher, tmp_path)
    assert ended.status == 0, ended.output
    assert_kept(before, tmp_path)
    assert not list((tmp_path / "run").glob(".ray*"))
    until(lambda: not processes(tmp_path), "all processes end", WAIT_S)
    assert_once(tmp_path, 2 * 12 + 1)
    # with the values that it has without the disturbance
    pd.testing.assert_frame_equal(trials(tmp_path), trials(whole))
    pd.testing.assert_frame_equal(curves(tmp_path), curves(whole))


FULL = (
    *(f"sweep.axes.training.{key}=null" for key in ("micro_batch", "precision", "accumulation")),
    *("sweep.kind=quality", "sweep.metric=eval_loss", "train.training.log_every=1"),
)


#: at the same step all are compared, so that it is known which ones are the bad ones
POPULATION = (
    *(*FULL, "sweep.axes.training.learning_rate=[0.05, 1e-6, 1e-7, 1e-8]"),
    "sweep.scheduler={name: pbt, perturbation_interval: 4, resample_probability: 0, synch: true}",
    *("train.training.steps=8", "train.training.micro_batch=16"),
)


def test_bad_trials_of_a_population_go_on_from_a_good_one(launcher, tmp_path):
    ended = sweep(launcher, tmp_path, *POPULATION)
    assert ended.status == 0, ended.output
    rows, lr = table(tmp_path, "trials").set_index("trial_id"), "learning_rate"
    assert list(rows["status"]) == ["succeeded"] * 4
    steps = table(tmp_path, "steps").set_index("trial_id")
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


@pytest.mark.slow
def test_a_population_that_was_killed_trains_no_stored_trial_again(launcher, tmp_path):
    process = start(tmp_path, *POPULATION, held="16")  # each step takes half a second
    until(lambda: finished(tmp_path), "a trial ends", WAIT_S, process)
    process.send_signal(signal.SIGKILL)
    assert end(process).status == -signal.SIGKILL
    before = finished(tmp_path)
    assert len(before) < 4
    ended = sweep(launcher, tmp_path, *POPULATION)
    assert ended.status == 0, ended.output
    assert_kept(before, tmp_path)
    assert_once(tmp_path, 4 + 1)
    assert list(table(tmp_path, "trials")["status"]) == ["succeeded"] * 4
    assert "nothing to do" in sweep(launcher, tmp_path, *POPULATION).output


def test_pb2_proposes_settings_within_their_range(launcher, tmp_path):
    """It needs two comparisons of a trial with the same settings before it proposes any."""
    low, high, lr = 1e-4, 0.05, "learning_rate"
    rates = f"sweep.axes.training.learning_rate={{low: {low}, high: {high}, log: true}}"
    pb2 = "sweep.scheduler={name: pb2, perturbation_interval: 2, synch: true}"
    asked = (*FULL, rates, "sweep.samples=4", pb2, "train.training.steps=12")
    ended = sweep(launcher, tmp_path, *asked)
    assert ended.status == 0, ended.output
    rows = table(tmp_path, "trials")
    histories = [json.loads(text) for text in rows["settings_history"].dropna()]
    begun = {history[0][lr] for history in histories} | set(rows[lr].dropna())
    used = {each[lr] for history in histories for each in history}
    assert all(low <= rate <= high for rate in used)
    assert used - begun


def test_hyperband_pauses_trials_and_stops_the_bad_ones(launcher, tmp_path):
    """Two trials are in a bracket without halving; of the next three, one goes on."""
    rates = "sweep.axes.training.learning_rate=[0.05, 0.02, 1e-8, 0.01, 1e-7]"
    band = "sweep.scheduler={name: hyperband, reduction_factor: 6}"
    ended = sweep(launcher, tmp_path, *FULL, rates, band, "train.training.steps=6")
    assert ended.status == 0, ended.output
    rows = table(tmp_path, "trials").set_index("learning_rate")
    expected = {0.05: 6, 0.02: 6, 0.01: 6, 1e-7: 1, 1e-8: 1}
    assert rows["steps"].to_dict() == expected
    assert set(rows["reason"].dropna()) == {"stopped early by hyperband"}
    found = table(tmp_path, "steps").groupby("trial_id")["step"].apply(list)
    assert found.to_dict() == {
        row["trial_id"]: list(range(1, expected[rate] + 1)) for rate, row in rows.iterrows()
    }


def assert_kept(before: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """What was finished was not started again; the parity follows at the end."""
    after = finished(folder)
    for key, row in before.items():
        assert {**after[key], "parity": None} == {**row, "parity": None}


def assert_once(folder: Path, units: int) -> None:
    """Every point was computed once; what follows from the trials is a unit, too."""
    once = Counter(line["key"] for line in recorded(folder) if line["table"] == "units")
    assert len(once) == units
    assert set(once.values()) == {1}
