"""Sweeps of a small experiment, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from ray.tune.search import create_searcher

from raypipe.commands import configuration as config
from raypipe.commands.selection import matrix_or_sweep
from raypipe.errors import ConfigError
from raypipe.graph.context import Session
from raypipe.graph.continuation import is_done
from raypipe.graph.experiment import Stage
from raypipe.graph.progress import Display
from raypipe.hardware import Gpu, Hardware
from raypipe.integrations.tracking import Trackers
from raypipe.launch.inline import InlineLauncher
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table, write_table
from raypipe.study.fit import fit_stage, fitting
from raypipe.study.sweep_settings import Searcher
from raypipe.study.trials import TrialMaker
from raypipe.training.tables import STEPS
from tests.raypipe.examples import sweeping
from tests.raypipe.examples.sweeping import HERE

ONLY = tuple(f"sweep.axes.training.{key}=null" for key in ("precision", "accumulation"))
QUALITY = ("sweep.kind=quality", "sweep.metric=eval_loss")
PBT = (*QUALITY, "sweep.scheduler=pbt")
RATE = "sweep.axes.training.learning_rate=[0.05, 1e-8]"
NONE = ("sweep.axes.training.micro_batch=null", *ONLY)
YAML = """
experiment: example_sweep
train: {training: {steps: 40, effective_batch: 16, learning_rate: 0.01, log_every: 5}}
sweep:
  stage: train
  steps: 4
  warmup_steps: 2
  repeats: 2
  axes:
    training.micro_batch: [2, 4, 8]
    training.precision: [fp32, bf16]
    training.accumulation: [1, 2]
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def stages_of(*overrides: str, node: Hardware = HERE, text: str = YAML) -> list[Stage]:
    return sweeping.stages_of(text, overrides, node)


def run(folder: Path, *overrides: str, node: Hardware = HERE, text: str = YAML) -> str | None:
    return sweeping.sweep(text, folder, overrides, node)


def trials(folder: Path) -> pd.DataFrame:
    table = read_table(RunDirectory.at(folder), "trials")
    table = table[(table["stage"] == "sweep") & table["repeats"].isna()].astype({"reference": bool})
    keys = ["micro_batch", "precision", "accumulation"]
    return table.sort_values(keys).set_index(keys)


def row_of(folder: Path, table: str) -> Mapping[str, Any]:
    rows = Ledger(RunDirectory.at(folder), writable=False).rows(table)
    assert len(rows) == 1
    return rows[0]


def test_every_point_is_measured_and_the_best_is_recommended(tmp_path):
    assert run(tmp_path) is None
    table = trials(tmp_path)
    assert len(table) == 12
    assert set(table["status"]) == {"succeeded"}
    assert set(table["steps"]) == {6}
    assert (table["effective_batch"] == [m * a for m, _, a in table.index]).all()
    best = row_of(tmp_path, "recommendations")
    assert best["trial_id"] in set(table["trial_id"])
    assert best["value_low"] <= best["value"] <= best["value_high"]
    assert best["settings"].keys() == {
        f"train.training.{key}"
        for key in ("micro_batch", "precision", "accumulation", "effective_batch")
    }
    run_directory = RunDirectory.at(tmp_path)
    assert not run_directory.exists(run_directory.model(table["trial_id"].iloc[0]))
    assert not run_directory.list(run_directory.path("checkpoints", "sweep"))
    front = read_table(run_directory, "pareto")
    assert set(front["trial_id"]) <= set(table["trial_id"])


def test_losses_are_compared_with_those_in_fp32(tmp_path):
    run(tmp_path)
    table = trials(tmp_path)
    assert table.xs("fp32", level="precision")["parity"].isna().all()
    half = table.xs("bf16", level="precision")["parity"]
    assert ((half > 1e-5) & (half < 0.1)).all()


def test_losses_are_compared_at_the_same_cut(tmp_path):
    """A precision without an fp32 trial of its cut has the difference that it has elsewhere."""
    kept = ("sweep.constraints.effective_batch=8", "sweep.axes.training.accumulation=null")
    assert run(tmp_path, *kept, "sweep.axes.training.precision=[bf16]") is None
    table = trials(tmp_path)
    losses = read_table(RunDirectory.at(tmp_path), "steps").set_index("trial_id")["loss"]
    (exact,) = table[table["reference"]]["trial_id"]
    mine = table.loc[(2, "bf16", 4)]
    reference = losses[exact].to_numpy()
    difference = losses[mine["trial_id"]].to_numpy() - reference
    expected = np.linalg.norm(difference) / np.linalg.norm(reference)
    assert mine["parity"] == pytest.approx(expected)
    assert set(table.xs("bf16", level="precision")["parity"]) == {mine["parity"]}


def test_without_fp32_among_the_points_a_reference_is_run(tmp_path):
    run(tmp_path, "sweep.axes.training.precision=[bf16]", "sweep.axes.training.accumulation=[2]")
    table = trials(tmp_path)
    references = table[table["reference"]]
    assert sorted(references["effective_batch"]) == [4, 8, 16]
    assert set(references.index.get_level_values("precision")) == {"fp32"}
    assert table[~table["reference"]]["parity"].notna().all()
    assert row_of(tmp_path, "recommendations")["settings"]["train.training.precision"] == "bf16"


def test_what_ran_out_of_memory_is_a_result_and_rules_out_more(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>4")
    assert run(tmp_path, "sweep.axes.training.micro_batch=[2,4,8,16]") is None
    status = trials(tmp_path)["status"]
    assert set(status.loc[:4]) == {"succeeded"}
    assert set(status.loc[8]) == {"out_of_memory"}
    assert set(status.loc[16]) == {"skipped"}
    reasons = trials(tmp_path)["reason"].loc[16]
    assert reasons.str.contains("micro-batch 8 with the same settings ran out of memory").all()
    failures = read_table(RunDirectory.at(tmp_path), "failures").query("stage == 'sweep'")
    assert list(failures["kind"]) == ["out_of_memory"] * 4
    assert row_of(tmp_path, "recommendations")["settings"]["train.training.micro_batch"] <= 4


def test_a_second_run_repeats_nothing_and_new_values_add_their_points(tmp_path):
    run(tmp_path)
    before = trials(tmp_path)
    ledger = Ledger(RunDirectory.at(tmp_path), writable=False)
    assert all(is_done(ledger, unit) for unit in stages_of()[0].units)
    run(tmp_path, "sweep.axes.training.micro_batch=[1,2,4,8]")
    after = trials(tmp_path)
    assert len(after) == 16
    del before["parity"], after["parity"]
    pd.testing.assert_frame_equal(after.loc[2:], before)


def test_a_failed_trial_is_a_row_and_is_run_again(tmp_path):
    failed = run(tmp_path, "sweep.axes.fail=[false, true]", "sweep.axes.training.micro_batch=[4]")
    assert failed is not None
    assert "the machine went away" in failed
    table = trials(tmp_path)
    assert sorted(table["status"]) == ["failed"] * 4 + ["succeeded"] * 4
    again = run(tmp_path, "sweep.axes.fail=[false, true]", "sweep.axes.training.micro_batch=[4]")
    assert again is not None
    failures = read_table(RunDirectory.at(tmp_path), "failures")
    assert len(failures) == 8


def test_a_loss_that_is_no_number_is_a_result(tmp_path):
    given = ("sweep.kind=quality", *NONE, "sweep.axes.training.learning_rate=[0.01,1e38]")
    assert run(tmp_path, *given) is None
    status = read_table(RunDirectory.at(tmp_path), "trials").set_index("status")
    assert set(status.index) >= {"succeeded", "failed"}
    assert "the loss is" in status.loc["failed", "reason"]
    chosen = row_of(tmp_path, "recommendations")["settings"]
    assert chosen == {"train.training.learning_rate": 0.01}


def test_a_precision_that_the_device_lacks_is_skipped(tmp_path):
    run(tmp_path, "sweep.axes.training.precision=[fp32, tf32]")
    table = trials(tmp_path).xs("tf32", level="precision")
    assert set(table["status"]) == {"skipped"}
    assert set(table["reason"]) == {"this CPU lacks tf32"}


def test_a_scheduler_is_told_what_earlier_trials_logged(tmp_path, monkeypatch):
    asha = (*ONLY, "sweep.kind=quality", "sweep.scheduler=asha", "train.training.steps=12",
            "train.training.monitor=null")  # fmt: skip
    told: list[Any] = []
    trials_of = InlineLauncher.trials

    def listen(self, trials, settings, run):
        told.append(list(trials.history()))
        trials_of(self, trials, settings, run)

    monkeypatch.setattr(InlineLauncher, "trials", listen)
    run(tmp_path, *asha)
    run(tmp_path, *asha, "sweep.axes.training.micro_batch=[2,4,8,16]")
    steps = read_table(RunDirectory.at(tmp_path), "steps")
    before, after = told
    assert not before
    assert [row["step"] for _, row in after] == [5, 10] * 3  # not the last, 12
    for trial_id, row in after:
        mine = steps[(steps["trial_id"] == trial_id) & (steps["step"] == row["step"])]
        assert mine["loss"].item() == row["loss"]


def test_an_axis_of_another_kind_takes_the_place_of_a_lower_levels():
    ranged = "sweep.axes.training.learning_rate={low: 1.0e-3, high: 0.1, log: true}"
    grid = "sweep.axes.training.learning_rate=[0.5]"
    for text, override in ((ranged, grid), (grid, ranged)):
        key, _, value = text.partition("=")
        file = YAML + f"    {key.removeprefix('sweep.axes.')}: {value}\n"
        assert len(stages_of(*ONLY, override, text=file)[0].units) > 3


def test_a_constraint_keeps_the_effective_batch(tmp_path):
    kept = "sweep.constraints.effective_batch=8"
    run(tmp_path, *ONLY, "sweep.axes.training.micro_batch=[2,4,8,16]", kept)
    table = trials(tmp_path)
    assert set(table["effective_batch"]) == {8}
    assert [(micro, accumulation) for micro, _, accumulation in table.index] == [
        (2, 4),
        (4, 2),
        (8, 1),
    ]
    both = stages_of(kept)[0]
    assert len(both.units) - 1 == 2 * 2  # (4, 2) and (8, 1), each in two precisions
    with pytest.raises(ConfigError, match=r"no point has training\.effective_batch = 1"):
        stages_of(
            *ONLY, "sweep.axes.training.micro_batch=[2,4]", "sweep.constraints.effective_batch=1"
        )


def test_a_quality_sweep_trains_in_full_and_keeps_the_models(tmp_path):
    rate = "sweep.axes.training.learning_rate={low: 1e-4, high: 0.1, log: true}"
    given = ("sweep.kind=quality", "sweep.metric=eval_loss", "sweep.samples=2", *NONE, rate)
    assert run(tmp_path, *given, "sweep.axes.width=[2, 8]") is None
    table = read_table(RunDirectory.at(tmp_path), "trials").query("stage == 'sweep'")
    assert len(table) == 4
    assert set(table["steps"]) == {40}
    best = row_of(tmp_path, "recommendations")
    assert best["value"] == table["eval_loss"].min()
    assert best["settings"].keys() == {"train.training.learning_rate", "width"}
    where = RunDirectory.at(tmp_path)
    assert all(where.exists(where.model(trial)) for trial in table["trial_id"])


def test_seeds_are_an_axis(tmp_path):
    axes = ("sweep.axes.training.seed=[0,1,2]", "sweep.axes.training.learning_rate=[1e-5,0.05]")
    assert run(tmp_path, "sweep.kind=quality", *NONE, *axes) is None
    table = read_table(RunDirectory.at(tmp_path), "trials").query("stage == 'sweep'")
    assert len(table) == table["loss_final"].nunique() == 6
    best = row_of(tmp_path, "recommendations")
    assert best["settings"] == {"train.training.learning_rate": 0.05}
    assert "mean of 3 seeds" in best["reason"]


def test_a_training_stage_takes_what_the_sweep_found(tmp_path):
    given = (
        "train.from_sweep=true",
        "train.training.steps=8",
        "sweep.constraints.effective_batch=8",
    )
    assert run(tmp_path, *given) is None
    found = row_of(tmp_path, "recommendations")["settings"]
    row = read_table(RunDirectory.at(tmp_path), "trials").set_index("trial_id").loc["train"]
    assert row["steps"] == 8
    for key in ("micro_batch", "accumulation", "effective_batch", "precision"):
        assert row[key] == found[f"train.training.{key}"]
    # a sweep that grows adds its points and leaves the model as it is
    before = row["samples_per_s"]
    assert run(tmp_path, *given, "sweep.axes.training.micro_batch=[1,2,4,8]") is None
    row = read_table(RunDirectory.at(tmp_path), "trials").set_index("trial_id").loc["train"]
    assert row["samples_per_s"] == before
    with pytest.raises(ConfigError, match=r"train\.training\.learning_rate"):
        run(tmp_path, *given, "train.training.learning_rate=0.5")


def test_what_fewer_workers_found_is_taken_by_as_many_as_were_asked_for(tmp_path):
    """The accumulation of an elastic trial follows its workers: 1 here, at most 2."""
    given = ("train.from_sweep=true", "train.scaling.workers=[1,2]", *ONLY)
    kept = ("train.training.steps=8", "sweep.constraints.effective_batch=16")
    assert run(tmp_path, *given, *kept, "sweep.axes.training.micro_batch=[2]") is None
    (trial,) = trials(tmp_path).index
    assert trial == (2, "fp32", 8)
    found = row_of(tmp_path, "recommendations")["settings"]
    assert found == {
        "train.training.micro_batch": 2,
        "train.training.accumulation": 4,
        "train.training.effective_batch": 16,
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sweep.stage=trian"], "must be a training stage of the experiment"),
        (["sweep.axes.training.precision=[fp4]"], "sweep.axes: train.training.precision = 'fp4'"),
        (["sweep.axes.training.lerning_rate=[1]"], "did you mean train.training.learning_rate"),
        (["sweep.axes.training.precision=bf16"], "must be a list of values"),
        (["sweep.axes.train.max_restarts=[1, 2]"], "are the same training of train"),
        (["sweep=null", "train.from_sweep=true"], "there is no sweep of it"),
        (PBT, "sweep.axes.train.training.micro_batch: cannot change during a training, which pbt"),
        ([*PBT, *NONE, "sweep.axes.width=[2,4]"], "sweep.axes.width: cannot change during"),
        ([*PBT, *NONE, RATE, "train.from_sweep=true"], "has had several settings"),
        ([*PBT, *NONE, RATE, "train.scaling.workers=2"], "cannot pause a group of workers"),
        ([*QUALITY, *NONE, RATE, "sweep.scheduler=pb2"], "pb2 chooses values between two ends"),
        ([*PBT, *NONE, RATE, "sweep.search=optuna"], "needs all trials at its start"),
        ([*PBT, *NONE, RATE, "sweep.concurrent=2"], "pbt starts all trials"),
        (
            [*PBT, *NONE, RATE, "sweep.scheduler={name: pbt, grace_period: 3}"],
            "grace_period: is not an option of pbt",
        ),
    ],
)
def test_mistakes_are_found_before_anything_starts(overrides, message):
    with pytest.raises(ConfigError, match=message):
        stages_of(*overrides)


def test_a_run_says_that_a_training_does_not_use_its_sweep() -> None:
    def message(*overrides: str, only: tuple[str, ...] = ()) -> str:
        found = config.resolve(config.parse(YAML, "c.yaml"), overrides, "auto", [HERE])
        return matrix_or_sweep(found, only)[1]

    expected = "train: does not use what the sweep recommends (train.from_sweep = false"
    assert message().startswith(expected)
    assert message(only=("sweep", "train")).startswith(expected)
    for only in (("sweep",), ("train",)):
        assert message(only=only) == ""
    assert message("train.from_sweep=true") == message("sweep=null") == ""


def test_nothing_runs_beside_measurements_on_a_cpu() -> None:
    card = Gpu(0, "GPU-1", "Card", 10 * 2**30, "9.0")
    with_gpu = Hardware("there", 8, 2**35, (card,))
    assert stages_of()[0].alone
    assert not stages_of(node=with_gpu)[0].alone
    assert stages_of("train.scaling.gpus_per_worker=0", node=with_gpu)[0].alone
    assert not stages_of("sweep.kind=quality")[0].alone


def test_the_device_is_part_of_what_a_trial_measures():
    card = Gpu(0, "GPU-1", "Card", 10 * 2**30, "9.0")
    node = Hardware("there", 8, 2**35, (card,))
    stage = stages_of("sweep.axes.training.micro_batch=[4,8,16,64]", node=node)[0]
    devices = {unit.identity.literals["device"] for unit in stage.units[:-1]}
    assert devices == {"Card"}
    assert {unit.key for unit in stage.units[:-1]}.isdisjoint(
        unit.key for unit in stages_of("sweep.axes.training.micro_batch=[4,8,16,64]")[0].units
    )


SEARCH = (
    *("sweep.kind=quality", "sweep.search=optuna", "sweep.metric=eval_loss", *NONE),
    *("sweep.axes.training.learning_rate={low: 1e-4, high: 0.1, log: true}",),
    *("sweep.axes.width=[2, 8]", "train.training.steps=10"),
)


def searched(folder: Path) -> pd.DataFrame:
    table = sweeping.with_points(RunDirectory.at(folder)).query("stage == 'sweep'")
    return table.sort_values("number").set_index("number")[["point", "eval_loss", "status"]]


def test_a_search_that_is_continued_goes_on_as_if_it_had_not_ended(tmp_path):
    assert run(tmp_path / "whole", *SEARCH, "sweep.samples=9") is None
    for samples in (4, 9):
        assert run(tmp_path / "parts", *SEARCH, f"sweep.samples={samples}") is None
        assert len(searched(tmp_path / "parts")) == samples
    pd.testing.assert_frame_equal(searched(tmp_path / "parts"), searched(tmp_path / "whole"))
    ledger = Ledger(RunDirectory.at(tmp_path / "whole"), writable=False)
    done = stages_of(*SEARCH, "sweep.samples=9")[0].units
    more = stages_of(*SEARCH, "sweep.samples=10")[0].units
    assert [is_done(ledger, unit) for unit in [*done, *more]] == [True, False]
    with pytest.raises(ConfigError, match=r"sweep\.samples: stored 9, now 3"):
        run(tmp_path / "whole", *SEARCH, "sweep.samples=3")


def test_optuna_optimizes_several_metrics(tmp_path):
    """The front has a trial with the best value of each metric."""
    several = ("sweep.further_metrics={loss_final: max}", "sweep.samples=5")
    assert run(tmp_path, *SEARCH, *several) is None
    table = sweeping.with_points(RunDirectory.at(tmp_path)).query("stage == 'sweep'")
    front = set(read_table(RunDirectory.at(tmp_path), "pareto")["trial_id"])
    by_trial = table.set_index("trial_id")
    assert len(by_trial) == 5
    assert {by_trial["eval_loss"].idxmin(), by_trial["loss_final"].idxmax()} <= front


def test_the_searchers_are_those_of_tune():
    with pytest.raises(ValueError, match="must be one of") as error:
        create_searcher("none")
    assert all(f"'{name}'" in str(error.value) for name in get_args(Searcher))


def test_a_failed_point_of_a_search_is_tried_again(tmp_path):
    asked = (*SEARCH, "sweep.axes.fail=[false, true]", "sweep.samples=6")
    for _ in range(2):
        assert "the machine went away" in (run(tmp_path, *asked) or "")
        assert set(searched(tmp_path)["status"]) == {"failed", "succeeded"}


def test_a_larger_micro_batch_with_the_same_settings_needs_more():
    found = config.resolve(config.parse(YAML, "c.yaml"), (), "auto", [HERE])
    maker = TrialMaker(found, found.settings.sweep, [HERE])
    made = {
        (trial.micro_batch, trial.precision, trial.accumulation): trial for trial in maker.trials()
    }
    small = made[4, "fp32", 2]
    assert made[8, "fp32", 2].needs_more_than(small)
    assert not made[8, "bf16", 2].needs_more_than(small)
    assert not made[2, "fp32", 2].needs_more_than(small)
    assert not small.needs_more_than(small)
    kept = ("sweep.constraints.effective_batch=8", *ONLY)  # without accumulation, no gradients stay
    found = config.resolve(config.parse(YAML, "c.yaml"), kept, "auto", [HERE])
    two, four, eight = TrialMaker(found, found.settings.sweep, [HERE]).trials()
    assert four.needs_more_than(two)
    assert not eight.needs_more_than(four)


def test_fit_finds_the_largest_micro_batch(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>5")
    where = RunDirectory.at(tmp_path)
    none = Trackers((), where, "r", "swept", {})
    session = Session(where, "r", Ledger(where), InlineLauncher(), Display(), [HERE], none)
    configuration = config.resolve(config.parse(YAML, "c.yaml"), (), "auto", [HERE])
    (maker,) = fitting(configuration, None, [HERE])
    rows = {row["precision"]: row for row in fit_stage(maker, session)}
    assert list(rows) == ["fp32", "tf32", "bf16", "fp16"]
    for precision in ("fp32", "bf16", "fp16"):
        row = rows[precision]
        assert (row["micro_batch"], row["too_large"], row["accumulation"]) == (5, 6, 4)
        assert row["samples_per_s"] > 0
    assert rows["tf32"]["micro_batch"] is None
    assert rows["tf32"]["note"] == "this CPU lacks tf32"
    monkeypatch.setenv("RAYPIPE_FAULTS", "")
    rows = {row["precision"]: row for row in fit_stage(maker, session)}
    assert (rows["fp32"]["micro_batch"], rows["fp32"]["accumulation"]) == (16, 1)
    assert "share of training.effective_batch" in rows["fp32"]["note"]
    monkeypatch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>0")
    rows = {row["precision"]: row for row in fit_stage(maker, session)}
    assert rows["fp32"]["micro_batch"] is None
    assert rows["fp32"]["note"] == "micro-batch 1 does not fit"
    with pytest.raises(ConfigError, match="--stage = 'x': must be a training stage"):
        fitting(configuration, "x", [HERE])


def test_the_steps_of_a_stopped_trial_are_stored_though_its_worker_was_ended(tmp_path, monkeypatch):
    """The worker had stored step 5 when the scheduler ended it at step 10."""

    def trials_ended_early(self, trials, settings, run):
        while (job := trials.next()) is not None:
            rows = [{"trial_id": job.trial_id, "step": n, "loss": 1.0 / n} for n in (5, 10)]
            write_table(run, STEPS, rows[:1], job.run_id, job.trial_id)
            for row in rows:
                trials.report(job.trial_id, row)
            trials.stopped(job.trial_id)

    monkeypatch.setattr(InlineLauncher, "trials", trials_ended_early)
    rate = "sweep.axes.training.learning_rate=[0.1, 0.2]"
    run(tmp_path, *NONE, rate, "sweep.kind=quality", "sweep.scheduler=asha")
    steps = read_table(RunDirectory.at(tmp_path), "steps").groupby("trial_id")["step"].apply(list)
    assert list(steps.drop("train")) == [[5, 10]] * 2
