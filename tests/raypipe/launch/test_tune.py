"""Sweeps on Ray Tune: the trials of a small experiment, and what becomes of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any, cast

import pandas as pd
import pytest
import ray
import torch
from torch import nn

import raypipe as rp
from raypipe.faults import VARIABLE
from raypipe.graph.launcher import Launcher
from raypipe.graph.runner import GraphRunner
from raypipe.launch import nodes
from raypipe.launch import trials as launched
from raypipe.launch.inline import InlineLauncher
from raypipe.study.sweep import Sweep
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.settings import ScalingSettings
from tests.command import is_alive, until
from tests.raypipe.composed import session_in
from tests.raypipe.examples.example_sweep import Line, SweptSettings
from tests.raypipe.study.test_sweep import NONE, ONLY, YAML, row_of, stages_of, table, trials
from tests.raypipe.study.test_sweep import cache as cache
from tests.scenario import cases

WITHIN_S = 400
ASHA = ("sweep.kind=quality", "sweep.scheduler={name: asha, reduction_factor: 2}")


class Noted(Line):
    """Notes each process that builds the model, and waits for ``together`` of them."""

    def __init__(self, settings: NotedSettings) -> None:
        super().__init__(settings.width, settings.fail)
        self.settings = settings

    def build_model(self) -> nn.Module:
        notes = self.settings.notes
        with notes.open("a") as file:
            file.write(f"{os.getpid()}\n")
        company = self.settings.together
        until(lambda: len(set(processes(notes))) >= company, "the other trials", WITHIN_S)
        if self.settings.exhaust:
            raise torch.OutOfMemoryError("CUDA out of memory, rehearsed")
        return super().build_model()

    def loss(self, model, batch, context):
        time.sleep(self.settings.pause_s)
        return super().loss(model, batch, context)


class NotedSettings(SweptSettings):
    notes: rp.Operational[Path]
    together: rp.Operational[int] = 1
    exhaust: bool = False
    pause_s: rp.Operational[float] = 0.0


def stages(settings: NotedSettings) -> Sequence[rp.Stage]:
    return [rp.train_stage("train", settings.train, lambda _, run_dir: Noted(settings))]


EXPERIMENT = rp.Experiment("noted", 1, NotedSettings, stages)


def sweep(folder: Path, launcher: Launcher, *overrides: str) -> str | None:
    """Run the sweep alone; None, or what failed."""
    text = YAML.replace("example_sweep", __name__) + f"notes: {folder / 'notes'}\n"
    folder.mkdir(parents=True, exist_ok=True)
    [stage, _] = stages_of(*overrides, text=text)
    return GraphRunner(session_in(folder, launcher)).run([stage])


def processes(notes: Path) -> list[int]:
    """Those that built a model, once for each model."""
    return [int(line) for line in notes.read_text().splitlines()]


def by_point(folder: Path, *axes: str) -> pd.DataFrame:
    """The trials by their values of these axes."""
    points = table(folder, "sweep_points")[["trial_id", *axes]]
    return table(folder, "trials").merge(points, on="trial_id").set_index([*axes]).sort_index()


def curves(folder: Path) -> pd.DataFrame:
    """The loss of each logged step by trial; fails where a step is there twice."""
    return table(folder, "steps").pivot(index="step", columns="trial_id", values="loss")


@pytest.mark.slow
def test_a_reused_actor_finds_what_this_process_finds(launcher, tmp_path):
    inline, tuned = tmp_path / "inline", tmp_path / "tuned"
    assert sweep(inline, InlineLauncher()) is None
    assert sweep(tuned, launcher) is None
    same = [
        *("trial_id", "status", "steps", "loss_final", "parity", "device"),
        *("effective_batch", "workers", "attempts", "parameters", "reason", "kind", "seed"),
    ]
    assert len(trials(tuned)) == 12
    pd.testing.assert_frame_equal(trials(tuned)[same], trials(inline)[same])
    pd.testing.assert_frame_equal(curves(tuned), curves(inline))
    assert (trials(tuned)["samples_per_s"] > 0).all()
    # a repeated measurement builds a model, too
    assert len(processes(tuned / "notes")) == len(table(tuned, "trials")) == 2 * 12
    assert len(set(processes(tuned / "notes"))) == 1  # what is measured has the node to itself
    assert not list(tuned.glob(".ray*"))


@pytest.mark.slow
def test_out_of_memory_rules_out_more_and_a_killed_trial_is_tried_again(
    launcher, tmp_path, monkeypatch
):
    inline, tuned = tmp_path / "inline", tmp_path / "tuned"
    points = ("sweep.axes.training.micro_batch=[4, 8, 16]", ONLY[0], "sweep.repeats=1")
    points += ("sweep.axes.training.accumulation=[1]",)
    monkeypatch.setenv(VARIABLE, "oom:micro_batch>4")
    assert sweep(inline, InlineLauncher(), *points) is None
    monkeypatch.setenv(VARIABLE, "oom:micro_batch>4,kill_worker:step=3")
    assert sweep(tuned, launcher, *points) is None
    assert list(trials(inline)["status"]) == ["succeeded", "out_of_memory", "skipped"]
    status, attempts = trials(tuned)["status"], trials(tuned)["attempts"]
    # the next trial is chosen while one runs: what that one rules out is too late for it
    assert list(status)[:2] == ["succeeded", "out_of_memory"]
    assert status.iloc[2] in ("out_of_memory", "skipped")
    assert row_of(tuned, "recommendations")["settings"]["train.training.micro_batch"] == 4
    assert attempts.iloc[0] == 2
    pd.testing.assert_frame_equal(curves(tuned), curves(inline))
    died = table(tuned, "failures").query("kind == 'worker_died'")
    assert list(died["unit"]) == [trials(tuned)["trial_id"].iloc[0]]
    assert set(died["outcome"]) == {"again"}


def test_what_goes_wrong_in_a_trial_is_its_row_and_no_more(launcher, tmp_path):
    axes = ("sweep.axes.training.micro_batch=[4]", *ONLY, "sweep.axes.fail=[true, false]")
    axes += ("sweep.axes.exhaust=[true, false]", "sweep.axes.scaling.cpus_per_worker=[512, 1]")
    assert sweep(tmp_path, launcher, *axes, "sweep.concurrent=1", "sweep.repeats=1") is not None
    rows = by_point(tmp_path, "train.scaling.cpus_per_worker", "exhaust", "fail")
    assert set(rows.loc[512, "status"]) == {"failed"}
    assert rows.loc[512, "reason"].str.contains("1 worker.* of 512 CPUs .* no room").all()
    assert set(rows.loc[(1, True), "status"]) == {"out_of_memory"}
    assert rows.loc[(1, False, True), "status"] == "failed"
    assert rows.loc[(1, False, True), "reason"] == "ConnectionError: the machine went away"
    assert rows.loc[(1, False, False), "status"] == "succeeded"
    # one process ran out of memory, failed, and went on
    assert len(processes(tmp_path / "notes")) == 4
    assert len(set(processes(tmp_path / "notes"))) == 1
    kinds = table(tmp_path, "failures")["kind"].value_counts()
    assert kinds.to_dict() == {"error": 5, "out_of_memory": 2}


@pytest.mark.slow
def test_each_trial_with_several_workers_has_a_group_of_its_own(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>4")
    points = ("sweep.axes.training.micro_batch=[2, 4, 8]", *ONLY, "train.scaling.workers=2")
    assert sweep(tmp_path, launcher, *points, "sweep.constraints.effective_batch=16") is None
    rows = table(tmp_path, "trials")
    rows = rows[rows["repeats"].isna()].set_index("micro_batch")
    assert rows["status"].to_dict() == {2: "succeeded", 4: "succeeded", 8: "out_of_memory"}
    found = curves(tmp_path)
    first, second = (found[rows.loc[size, "trial_id"]] for size in (2, 4))
    pd.testing.assert_series_equal(first, second, rtol=1e-5, check_names=False)
    workers = processes(tmp_path / "notes")
    assert len(workers) == 2 * len(table(tmp_path, "trials")) == 2 * (2 * 2 + 1)
    assert len(set(workers)) == len(workers)  # each trial has a group of its own
    assert not list(tmp_path.glob(".ray*"))


@pytest.mark.slow
def test_trials_in_full_run_beside_each_other_and_none_is_ended_at_its_end(launcher, tmp_path):
    """Its model would be thrown away: here the held-out loss comes with the last step alone."""
    rate = "sweep.axes.training.learning_rate=[0.05, 1e-5, 1e-6, 1e-7]"
    given = (*NONE, rate, *ASHA, "sweep.metric=eval_loss", "sweep.concurrent=2", "together=2")
    given = (*given, "train.training.eval_every=1000")
    inline, tuned = tmp_path / "inline", tmp_path / "tuned"
    assert sweep(inline, InlineLauncher(), *given, "together=1") is None
    assert sweep(tuned, launcher, *given) is None
    assert set(table(tuned, "trials")["status"]) == {"succeeded"}
    same = ["trial_id", "status", "steps", "loss_final", "eval_loss"]
    rate = "train.training.learning_rate"
    pd.testing.assert_frame_equal(by_point(tuned, rate)[same], by_point(inline, rate)[same])
    pd.testing.assert_frame_equal(curves(tuned), curves(inline))
    assert len(processes(tuned / "notes")) == 4
    assert len(set(processes(tuned / "notes"))) == 2
    assert len(list((tuned / "models").iterdir())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_asha_ends_bad_trials_early_and_all_of_a_worker_group(launcher, tmp_path, workers):
    """A group trains on in processes of its own when Tune ends its trial."""
    rate = "sweep.axes.training.learning_rate=[0.05, 1e-6, 1e-7]"
    given = (*NONE, rate, *ASHA, "sweep.scheduler.grace_period=10", "pause_s=0.05")
    long = ("train.training.steps=200", "train.training.checkpoint_every=2")
    assert sweep(tmp_path, launcher, *given, *long, f"train.scaling.workers={workers}") is None
    rows = by_point(tmp_path, "train.training.learning_rate")
    stopped, found = rows[rows["status"] == "interrupted"], curves(tmp_path)
    last = {id: found[id].last_valid_index() for id in stopped["trial_id"]}
    if workers == 1:
        assert last == dict(zip(stopped["trial_id"], stopped["steps"], strict=True))
    else:
        assert max(last.values()) < 100
        cpus = ray.cluster_resources()["CPU"]
        until(lambda: ray.available_resources().get("CPU") == cpus, "all CPUs are free", WITHIN_S)
        group = processes(tmp_path / "notes")
        assert len(group) == 2 * 3
        # their resources are free a moment before they have ended
        until(lambda: not any(map(is_alive, group)), "the workers have ended", 5)
    assert rows[["status", "steps"]].iloc[-1].to_list() == ["succeeded", 200]
    assert len(stopped) >= workers  # one of those that begin at once may be ahead to the end
    assert max(last.values()) < 200
    assert set(stopped["reason"]) == {"stopped early by asha"}
    assert not list((tmp_path / "checkpoints").iterdir())
    assert len(list((tmp_path / "models").iterdir())) == len(rows) - len(stopped)
    assert not list(tmp_path.glob(".ray*"))
    best = row_of(tmp_path, "recommendations")
    assert best["settings"] == {"train.training.learning_rate": 0.05}


@pytest.mark.parametrize(("gpus", "measured", "workers", "slots"), cases(__file__, "slots"))
def test_trials_run_at_the_same_time_where_they_do_not_disturb_each_other(
    gpus, measured, workers, slots, tmp_path, monkeypatch
):
    found = {"a": {"CPU": 16.0, "GPU": 4.0}, "b": {"CPU": 16.0, "GPU": 2.0}}
    for module in (launched, nodes):
        monkeypatch.setattr(module, "living_nodes", lambda: found)
    settings = rp.TrainStageSettings(scaling=ScalingSettings(workers=workers, gpus_per_worker=gpus))
    plan, run = BatchPlan(1, 1, workers, workers), rp.RunDirectory.at(tmp_path)
    job = TrainingJob("t", "run", Line(4, False), settings, plan, run)
    monkeypatch.setattr("raypipe.study.sweep.job_of", lambda *_: job)
    session = Namespace(nodes=[Namespace(cpus=16)], launcher=Namespace(concurrent=True))
    context = Namespace(session=session, beside=lambda: "ab", run_dir=run)
    kind = Namespace(is_systems=measured)
    trial: Any = Namespace(unit=None, training=None, attempt=1)
    sized = Sweep._job(cast("Sweep", Namespace(_context=context, settings=kind)), trial)
    assert launched._slots(sized) == slots
    alone = measured and not gpus
    assert sized.settings.scaling.threads == (16 // workers if alone else 1)
