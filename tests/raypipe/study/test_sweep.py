"""Sweeps of a small experiment, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from ray.tune.search import create_searcher

from raypipe.commands import configuration as config
from raypipe.commands.selection import matrix_or_sweep
from raypipe.errors import ConfigError, UnitError
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
from raypipe.study.population import Lineage
from raypipe.study.sweep_settings import Searcher
from raypipe.study.trials import TrialMaker
from raypipe.training.job import TrainingJob
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
CARD = Hardware("there", 8, 2**35, (Gpu(0, "GPU-1", "Card", 10 * 2**30, "9.0"),))
Speed = Callable[[TrainingJob, int], float]


class Killed(BaseException):
    """The end of the process."""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Speed], list[int]]:
    """Let a function of the job and its number set the speed; the micro-batches in their order."""
    train = InlineLauncher.train

    def use(speed: Speed) -> list[int]:
        sizes: list[int] = []

        def measured(self: InlineLauncher, job: TrainingJob, report: Any, *rest: Any) -> Any:
            if not job.measured:
                return train(self, job, report, *rest)
            sizes.append(job.plan.micro_batch)
            found = speed(job, len(sizes))
            return train(self, job, report, *rest) | {"samples_per_s": found}

        monkeypatch.setattr(InlineLauncher, "train", measured)
        return sizes

    return use


def stages_of(*overrides: str, node: Hardware = HERE, text: str = YAML) -> list[Stage]:
    return sweeping.stages_of(text, overrides, node)


def run(folder: Path, *overrides: str) -> str | None:
    return sweeping.sweep(YAML, folder, overrides)


def table(folder: Path, name: str = "trials") -> pd.DataFrame:
    found = read_table(RunDirectory.at(folder), name)
    return found[found["stage"] == "sweep"] if name == "trials" else found


def trials(folder: Path) -> pd.DataFrame:
    found = table(folder)
    found = found[found["repeats"].isna()].astype({"reference": bool})
    keys = ["micro_batch", "precision", "accumulation"]
    return found.sort_values(keys).set_index(keys)


def row_of(folder: Path, name: str) -> Mapping[str, Any]:
    (row,) = Ledger(RunDirectory.at(folder), writable=False).rows(name)
    return row


def test_every_point_is_measured_and_the_best_is_recommended(tmp_path):
    assert run(tmp_path) is None
    found, where = trials(tmp_path), RunDirectory.at(tmp_path)
    assert len(found) == 12
    assert set(found["status"]) == {"succeeded"}
    assert set(found["steps"]) == {6}
    assert (found["effective_batch"] == [m * a for m, _, a in found.index]).all()
    best = row_of(tmp_path, "recommendations")
    assert best["trial_id"] in set(found["trial_id"])
    assert best["value_low"] <= best["value"] <= best["value_high"]
    sizes = ("micro_batch", "precision", "accumulation", "effective_batch")
    assert best["settings"].keys() == {f"train.training.{key}" for key in sizes}
    assert not where.exists(where.model(found["trial_id"].iloc[0]))
    assert not where.list(where.path("checkpoints", "sweep"))
    assert set(table(tmp_path, "pareto")["trial_id"]) <= set(found["trial_id"])
    # losses are compared with those in fp32
    assert found.xs("fp32", level="precision")["parity"].isna().all()
    half = found.xs("bf16", level="precision")["parity"]
    assert ((half > 1e-5) & (half < 0.1)).all()
    # a continued sweep runs only the added points
    ledger = Ledger(where, writable=False)
    assert all(is_done(ledger, unit) for unit in stages_of()[0].units)
    run(tmp_path, "sweep.axes.training.micro_batch=[1,2,4,8]")
    after = trials(tmp_path)
    assert len(after) == 16
    pd.testing.assert_frame_equal(
        after.loc[2:].drop(columns="parity"), found.drop(columns="parity")
    )


def test_losses_are_compared_at_the_same_cut(tmp_path):
    """A precision without an fp32 trial of its cut has the difference that it has elsewhere."""
    kept = ("sweep.constraints.effective_batch=8", "sweep.axes.training.accumulation=null")
    assert run(tmp_path, *kept, "sweep.axes.training.precision=[bf16]") is None
    found = trials(tmp_path)
    losses = table(tmp_path, "steps").set_index("trial_id")["loss"]
    (exact,) = found[found["reference"]]["trial_id"]
    mine, reference = found.loc[(2, "bf16", 4)], losses[exact].to_numpy()
    difference = losses[mine["trial_id"]].to_numpy() - reference
    expected = np.linalg.norm(difference) / np.linalg.norm(reference)
    assert mine["parity"] == pytest.approx(expected)
    assert set(found.xs("bf16", level="precision")["parity"]) == {mine["parity"]}


def test_a_failed_trial_is_a_row_and_is_run_again(tmp_path):
    asked = ("sweep.axes.fail=[false, true]", "sweep.axes.training.micro_batch=[4]")
    for failures in (4, 8):
        assert "the machine went away" in (run(tmp_path, *asked) or "")
        assert sorted(trials(tmp_path)["status"]) == ["failed"] * 4 + ["succeeded"] * 4
        assert len(table(tmp_path, "failures")) == failures


def test_a_loss_that_is_no_number_is_a_result(tmp_path):
    axes = "sweep.axes.training.learning_rate=[0.01,1e38]"
    assert run(tmp_path, "sweep.kind=quality", *NONE, axes) is None
    status = table(tmp_path).set_index("status")
    assert "the loss is" in status.loc["failed", "reason"]
    chosen = row_of(tmp_path, "recommendations")["settings"]
    assert chosen == {"train.training.learning_rate": 0.01}


def test_a_precision_that_the_device_lacks_is_skipped(tmp_path):
    run(tmp_path, "sweep.axes.training.precision=[fp32, tf32]", "sweep.repeats=1")
    found = trials(tmp_path).xs("tf32", level="precision")
    assert set(found["status"]) == {"skipped"}
    assert set(found["reason"]) == {"this CPU lacks tf32"}


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
    losses = table(tmp_path, "steps").set_index(["trial_id", "step"])["loss"]
    before, after = told
    assert not before
    assert [row["step"] for _, row in after] == [5, 10] * 3  # not the last, 12
    assert all(losses[trial_id, row["step"]] == row["loss"] for trial_id, row in after)


def test_a_constraint_keeps_the_effective_batch(tmp_path):
    kept = "sweep.constraints.effective_batch=8"
    run(tmp_path, *ONLY, "sweep.axes.training.micro_batch=[2,4,8,16]", kept)
    assert set(trials(tmp_path)["effective_batch"]) == {8}
    assert [(m, a) for m, _, a in trials(tmp_path).index] == [(2, 4), (4, 2), (8, 1)]
    both = stages_of(kept)[0]
    assert len(both.units) - 1 == 2 * 2  # (4, 2) and (8, 1), each in two precisions


def test_a_quality_sweep_trains_in_full_and_keeps_the_models(tmp_path):
    rate = "sweep.axes.training.learning_rate={low: 1e-4, high: 0.1, log: true}"
    assert (
        run(tmp_path, *QUALITY, "sweep.samples=2", *NONE, rate, "sweep.axes.width=[2, 8]") is None
    )
    found, where = table(tmp_path), RunDirectory.at(tmp_path)
    assert len(found) == 4
    assert set(found["steps"]) == {40}
    best = row_of(tmp_path, "recommendations")
    assert best["value"] == found["eval_loss"].min()
    assert best["settings"].keys() == {"train.training.learning_rate", "width"}
    assert "one seed" in best["reason"]
    assert all(where.exists(where.model(trial)) for trial in found["trial_id"])
    front, by_trial = table(tmp_path, "pareto").set_index("trial_id"), found.set_index("trial_id")
    assert by_trial["eval_loss"].idxmin() in front.index
    assert (front["quality"] == by_trial.loc[front.index, "eval_loss"]).all()


def test_seeds_are_an_axis(tmp_path):
    axes = ("sweep.axes.training.seed=[0,1,2]", "sweep.axes.training.learning_rate=[1e-5,0.05]")
    assert run(tmp_path, "sweep.kind=quality", *NONE, *axes) is None
    found = table(tmp_path)
    assert len(found) == found["loss_final"].nunique() == 6
    best = row_of(tmp_path, "recommendations")
    assert best["settings"] == {"train.training.learning_rate": 0.05}
    assert "mean of 3 seeds" in best["reason"]


def test_a_training_stage_takes_what_the_sweep_found(tmp_path):
    given = ("train.from_sweep=true", "train.training.steps=8")
    given += ("sweep.constraints.effective_batch=8",)
    assert run(tmp_path, *given) is None
    settings = row_of(tmp_path, "recommendations")["settings"]

    def trained() -> Any:
        return read_table(RunDirectory.at(tmp_path), "trials").set_index("trial_id").loc["train"]

    before = trained()
    assert before["steps"] == 8
    for key in ("micro_batch", "accumulation", "effective_batch", "precision"):
        assert before[key] == settings[f"train.training.{key}"]
    # a sweep that grows adds its points and leaves the model as it is
    assert run(tmp_path, *given, "sweep.axes.training.micro_batch=[1,2,4,8]") is None
    assert trained()["samples_per_s"] == before["samples_per_s"]
    with pytest.raises(ConfigError, match=r"train\.training\.learning_rate"):
        run(tmp_path, *given, "train.training.learning_rate=0.5")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sweep.stage=trian"], "must be a training stage of the experiment"),
        (["sweep.axes.training.precision=[fp4]"], "sweep.axes: train.training.precision = 'fp4'"),
        (["sweep.axes.training.lerning_rate=[1]"], "did you mean train.training.learning_rate"),
        (["sweep.axes.training.precision=bf16"], "must be a list of values"),
        (["sweep.axes.train.max_restarts=[1, 2]"], "are the same training of train"),
        (["sweep=null", "train.from_sweep=true"], "there is no sweep of it"),
        (["sweep.constraints.effective_batch=1"], r"no point has training\.effective_batch = 1"),
        (["sweep.scheduler=asha"], "is for kind = quality"),
        (["sweep.metric=eval_loss"], "take kind = quality"),
        (["sweep.further_metrics={eval_loss: min}"], "for search = optuna"),
        (PBT, "sweep.axes.train.training.micro_batch: cannot change during a training, which pbt"),
        ([*PBT, *NONE, "sweep.axes.width=[2,4]"], "sweep.axes.width: cannot change during"),
        ([*PBT, *NONE, RATE, "train.from_sweep=true"], "has had several settings"),
        ([*PBT, *NONE, RATE, "train.scaling.workers=2"], "cannot pause a group of workers"),
        ([*QUALITY, *NONE, RATE, "sweep.scheduler=pb2"], "pb2 chooses values between two ends"),
        ([*PBT, *NONE, RATE, "sweep.search=optuna"], "needs all trials at its start"),
        ([*PBT, *NONE, RATE, "sweep.concurrent=2"], "pbt starts all trials"),
        ([*PBT, "sweep.scheduler={name: pbt, grace_period: 3}"], "is not an option of pbt"),
    ],
)
def test_mistakes_are_found_before_anything_starts(overrides, message):
    with pytest.raises(ConfigError, match=message):
        stages_of(*overrides)


def test_an_axis_of_another_kind_takes_the_place_of_a_lower_levels():
    ranged = "sweep.axes.training.learning_rate={low: 1.0e-3, high: 0.1, log: true}"
    grid = "sweep.axes.training.learning_rate=[0.5]"
    for text, override in ((ranged, grid), (grid, ranged)):
        key, _, value = text.partition("=")
        file = YAML + f"    {key.removeprefix('sweep.axes.')}: {value}\n"
        assert len(stages_of(*ONLY, override, text=file)[0].units) > 3


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


def test_the_device_decides_what_a_trial_measures_and_what_runs_beside_it() -> None:
    axes = "sweep.axes.training.micro_batch=[4,8,16,64]"
    here, there = (stages_of(axes, node=node)[0] for node in (HERE, CARD))
    assert {unit.identity.literals["device"] for unit in there.units[:-1]} == {"Card"}
    assert {unit.key for unit in there.units}.isdisjoint(unit.key for unit in here.units)
    assert here.alone
    assert not there.alone
    assert stages_of("train.scaling.gpus_per_worker=0", node=CARD)[0].alone
    assert not stages_of("sweep.kind=quality")[0].alone


SEARCH = (
    *(*QUALITY, "sweep.search=optuna", *NONE, "sweep.axes.width=[2, 8]"),
    *("sweep.axes.training.learning_rate={low: 1e-4, high: 0.1, log: true}",),
    "train.training.steps=10",
)


def searched(folder: Path) -> pd.DataFrame:
    found = sweeping.with_points(RunDirectory.at(folder)).query("stage == 'sweep'")
    return found.sort_values("number").set_index("number")[["point", "eval_loss", "status"]]


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


def test_optuna_optimizes_several_metrics_and_tries_failed_points_again(tmp_path):
    """The front has a trial with the best value of each metric."""
    several = ("sweep.further_metrics={loss_final: max}", "sweep.samples=5")
    assert run(tmp_path, *SEARCH, *several) is None
    by_trial = table(tmp_path).set_index("trial_id")
    front = set(table(tmp_path, "pareto")["trial_id"])
    assert len(by_trial) == 5
    assert {by_trial["eval_loss"].idxmin(), by_trial["loss_final"].idxmax()} <= front
    asked = (*SEARCH, "sweep.axes.fail=[false, true]", "sweep.samples=6")
    for _ in range(2):
        assert "the machine went away" in (run(tmp_path / "failing", *asked) or "")
        assert set(searched(tmp_path / "failing")["status"]) == {"failed", "succeeded"}


def test_the_searchers_are_those_of_tune():
    with pytest.raises(ValueError, match="must be one of") as error:
        create_searcher("none")
    assert all(f"'{name}'" in str(error.value) for name in get_args(Searcher))


def test_a_larger_micro_batch_with_the_same_settings_needs_more():
    def made(*overrides: str) -> dict[Any, Any]:
        found = config.resolve(config.parse(YAML, "c.yaml"), overrides, "auto", [HERE])
        trials = TrialMaker(found, found.settings.sweep, [HERE]).trials()
        return {(t.micro_batch, t.precision, t.accumulation): t for t in trials}

    trials = made()
    small = trials[4, "fp32", 2]
    assert trials[8, "fp32", 2].needs_more_than(small)
    for other in ((8, "bf16", 2), (2, "fp32", 2), (4, "fp32", 2)):
        assert not trials[other].needs_more_than(small)
    # without accumulation, no gradients stay
    two, four, eight = made("sweep.constraints.effective_batch=8", *ONLY).values()
    assert four.needs_more_than(two)
    assert not eight.needs_more_than(four)


def test_fit_finds_the_largest_micro_batch(monkeypatch, tmp_path):
    where = RunDirectory.at(tmp_path)
    none = Trackers((), where, "r", "swept", {})
    session = Session(where, "r", Ledger(where), InlineLauncher(), Display(), [HERE], none)
    configuration = config.resolve(config.parse(YAML, "c.yaml"), (), "auto", [HERE])
    (maker,) = fitting(configuration, None, [HERE])

    def fit(faults: str) -> dict[str, Any]:
        monkeypatch.setenv("RAYPIPE_FAULTS", faults)
        return {row["precision"]: row for row in fit_stage(maker, session)}

    rows = fit("oom:micro_batch>5")
    assert list(rows) == ["fp32", "tf32", "bf16", "fp16"]
    for precision in ("fp32", "bf16", "fp16"):
        row = rows[precision]
        assert (row["micro_batch"], row["too_large"], row["accumulation"]) == (5, 6, 4)
        assert row["samples_per_s"] > 0
    assert rows["tf32"]["micro_batch"] is None
    assert rows["tf32"]["note"] == "this CPU lacks tf32"
    row = fit("")["fp32"]
    assert (row["micro_batch"], row["accumulation"]) == (16, 1)
    assert "share of training.effective_batch" in row["note"]
    row = fit("oom:micro_batch>0")["fp32"]
    assert (row["micro_batch"], row["note"]) == (None, "micro-batch 1 does not fit")
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
    run(tmp_path, *NONE, RATE, "sweep.kind=quality", "sweep.scheduler=asha")
    steps = table(tmp_path, "steps").groupby("trial_id")["step"].apply(list)
    assert list(steps.drop("train")) == [[5, 10]] * 2


def test_a_trial_that_took_over_another_has_its_settings_or_none(tmp_path):
    """A changed setting has no value, and one that it kept is not that of its own start."""
    where = RunDirectory.at(tmp_path)
    changes = [{"learning_rate": 0.5, "clip_norm": 1.0}, {"learning_rate": 0.5, "clip_norm": 2.0}]
    Lineage("a", [{"step": 10 * n, **each} for n, each in enumerate(changes)]).write(where)
    found = Lineage.of(where, "a").columns
    assert json.loads(found.pop("settings_history"))[1] == {"step": 10, **changes[1]}
    assert found == {"learning_rate": 0.5, "clip_norm": None}
    Lineage("b", [{"step": 0, **changes[0]}]).write(where)
    assert Lineage.of(where, "b").columns == Lineage.of(where, "c").columns == {}


# repeated measurements, at the speeds of a made-up machine

REPEATED = (*ONLY, "sweep.repeats=3", "sweep.constraints.effective_batch=16")


def calm(job: TrainingJob, number: int) -> float:
    return {2: 50.0, 4: 80.0, 8: 100.0, 16: 120.0}[job.plan.micro_batch] + number % 2


def test_all_points_are_measured_once_then_all_again(machine, tmp_path) -> None:
    sizes = machine(calm)
    assert run(tmp_path, *REPEATED) is None
    assert sizes == [2, 4, 8] * 3
    found = table(tmp_path)
    assert set(found["status"]) == {"succeeded"}
    first = set(found[found["repeats"].isna()]["trial_id"])
    assert found["repeats"].value_counts().to_dict() == dict.fromkeys(first, 2)
    best, values = row_of(tmp_path, "recommendations"), [100.0, 100.0, 101.0]
    assert best["settings"]["train.training.micro_batch"] == 8
    assert best["trial_id"] in first
    assert sorted(found[found["micro_batch"] == 8]["samples_per_s"]) in (values, [100, 101, 101])
    assert (best["value_low"], best["value_high"]) == (100.0, 101.0)
    assert "(median of 3, 100 to 101)" in best["reason"]
    assert set(table(tmp_path, "pareto")["trial_id"]) <= first
    # further points and measurements add only theirs
    sizes = machine(calm)
    more = ("sweep.repeats=4", "sweep.axes.training.micro_batch=[2,4,8,16]")
    assert run(tmp_path, *REPEATED, *more) is None
    assert sizes == [16, 16, 16, 2, 4, 8, 16]
    assert row_of(tmp_path, "recommendations")["settings"]["train.training.micro_batch"] == 16


def test_overlapping_ranges_are_a_tie(machine, tmp_path) -> None:
    noise = [1.0, 0.2, 1.6, 0.5, 0.9, 0.3, 1.4, 0.7, 1.2]
    machine(lambda job, number: 30.0 * noise[number % 9])
    assert run(tmp_path, *REPEATED) is None
    reason = row_of(tmp_path, "recommendations")["reason"]
    assert reason.startswith("The simplest of 3 points that are tied for the best of 3")


def test_a_kill_loses_one_measurement_and_repeats_none(machine, tmp_path) -> None:
    def dies(job: TrainingJob, number: int) -> float:
        if number == 6:
            raise Killed
        return calm(job, number)

    def stored() -> dict[str, Any]:
        return dict(Ledger(RunDirectory.at(tmp_path), writable=False).items("trials"))

    sizes = machine(dies)
    with pytest.raises(Killed):
        run(tmp_path, *REPEATED)
    before = stored()
    assert (len(before), len(sizes)) == (5, 6)
    for left in ([8, 2, 4, 8], []):
        sizes = machine(calm)
        assert run(tmp_path, *REPEATED) is None
        assert sizes == left
        assert stored().items() >= before.items()


@pytest.mark.parametrize("kind", ["out_of_memory", "error"])
def test_a_point_that_fails_later_is_not_recommended(machine, tmp_path, kind) -> None:
    """What ran out of memory is a result; an error is exit status 1, and tried again."""

    def fails(job: TrainingJob, number: int) -> float:
        if number > 3 and job.plan.micro_batch == 8:
            raise UnitError(job.trial_id, kind, "no room is left")
        return calm(job, number)

    sizes = machine(fails)
    failed = run(tmp_path, *REPEATED)
    assert sizes == [2, 4, 8] * 2 + [2, 4]
    best = row_of(tmp_path, "recommendations")
    assert best["settings"]["train.training.micro_batch"] == 4
    assert ("no room is left" in (failed or "")) == (kind == "error")
    sizes = machine(calm)
    assert run(tmp_path, *REPEATED) is None
    assert sizes == ([8, 8] if kind == "error" else [])
