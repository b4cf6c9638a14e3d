"""Sweeps of a small experiment, in this process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from ray.tune.search import create_searcher

from raypipe.commands import configuration as config
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.experiment import Stage
from raypipe.graph.stored_results import is_done
from raypipe.hardware import Gpu, Hardware
from raypipe.launch.inline import InlineLauncher
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table, write_table
from raypipe.study.largest_batch import fit_stage, fitting
from raypipe.study.sweep import TrialMaker
from raypipe.study.sweep_settings import Searcher
from raypipe.training.job import TrainingJob
from raypipe.training.tables import STEPS
from tests.raypipe.composed import session_in
from tests.raypipe.examples import sweeping
from tests.raypipe.examples.sweeping import HERE
from tests.scenario import cases

ONLY = tuple(f"sweep.axes.training.{key}=null" for key in ("precision", "accumulation"))
QUALITY = ("sweep.kind=quality", "sweep.metric=eval_loss")
RATE = "sweep.axes.training.learning_rate=[0.05, 1e-8]"
NONE = ("sweep.axes.training.micro_batch=null", *ONLY)
YAML = Path(__file__).with_name("sweep.yaml").read_text()
CARD = Hardware("there", 8, 2**35, (Gpu(0, "GPU-1", "Card", 10 * 2**30, "9.0"),))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def stages_of(*overrides: str, node: Hardware = HERE, text: str = YAML) -> list[Stage]:
    return sweeping.stages_of(text, overrides, node)


def run(folder: Path, *overrides: str) -> str | None:
    return sweeping.sweep(YAML, folder, overrides)


def table(folder: Path, name: str = "trials") -> pd.DataFrame:
    found = read_table(RunDirectory.at(folder), name)
    return found[found["stage"] == "sweep"] if name == "trials" else found


def trials(folder: Path) -> pd.DataFrame:
    found = table(folder)
    found = found[found["repeats"].isna()]
    keys = ["micro_batch", "precision", "accumulation"]
    return found.sort_values(keys).set_index(keys)


def row_of(folder: Path, name: str) -> Row:
    (row,) = Ledger(RunDirectory.at(folder), writable=False).rows(name)
    return row


def test_every_point_is_measured_and_added_ones_alone_after_it(tmp_path):
    once = "sweep.repeats=1"
    assert run(tmp_path, once) is None
    found, where = trials(tmp_path), RunDirectory.at(tmp_path)
    assert len(found) == 12
    assert set(found["status"]) == {"succeeded"}
    assert set(found["steps"]) == {6}
    assert (found["effective_batch"] == [m * a for m, _, a in found.index]).all()
    assert not where.exists(where.model(found["trial_id"].iloc[0]))
    assert not where.list(where.path("checkpoints", "sweep"))
    # losses are compared with those in fp32
    assert found.xs("fp32", level="precision")["parity"].isna().all()
    half = found.xs("bf16", level="precision")["parity"]
    assert ((half > 1e-5) & (half < 0.1)).all()
    # a continued sweep runs only the added points
    ledger = Ledger(where, writable=False)
    assert all(is_done(ledger, unit) for unit in stages_of(once)[0].units)
    more = "sweep.axes.training.precision=[fp32,bf16,tf32]"
    run(tmp_path, once, "sweep.axes.training.micro_batch=[1,2,4,8]", more)
    after = trials(tmp_path)
    assert len(after) == 24
    lacking = after.xs("tf32", level="precision")
    assert set(zip(lacking["status"], lacking["reason"], strict=True)) == {
        ("skipped", "this CPU lacks tf32")
    }
    kept = after.drop("tf32", level="precision").loc[2:]
    one, other = (each.drop(columns="parity") for each in (kept, found))
    pd.testing.assert_frame_equal(one, other, check_dtype=False)


def test_losses_are_compared_with_fp32_at_otherwise_the_same_settings(tmp_path, monkeypatch):
    """A trial whose partner did not succeed has the difference that its precision has elsewhere."""
    train = InlineLauncher.train

    def too_large(self: InlineLauncher, job: TrainingJob, *rest: Any) -> Any:
        if job.settings.training.precision == "fp32" and job.plan.micro_batch == 8:
            raise UnitError(job.trial_id, "out_of_memory", "none left")
        if job.settings.training.precision == "bf16" and job.attempt == 1:
            raise UnitError(job.trial_id, "worker_died", "lost")
        return train(self, job, *rest)

    monkeypatch.setattr(InlineLauncher, "train", too_large)
    axes = ("sweep.axes.training.accumulation=null", "sweep.axes.training.micro_batch=[2, 8]")
    assert run(tmp_path, *axes, "sweep.repeats=1") is None
    found = trials(tmp_path).droplevel("accumulation")
    losses = table(tmp_path, "steps").set_index("trial_id")["loss"]
    exact, half = (losses[found.loc[(2, name), "trial_id"]].to_numpy() for name in ("fp32", "bf16"))
    expected = np.linalg.norm(half - exact) / np.linalg.norm(exact)
    assert list(found.xs("bf16", level="precision")["parity"]) == [pytest.approx(expected)] * 2
    assert found["attempts"].to_dict() == {
        (2, "bf16"): 2, (2, "fp32"): 1, (8, "bf16"): 2, (8, "fp32"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("case", cases(__file__, "refused_sweeps"), ids=str)
def test_mistakes_are_found_before_anything_starts(case):
    *overrides, message = case
    given = [key for part in overrides for key in (part if isinstance(part, list) else [part])]
    with pytest.raises(ConfigError, match=re.escape(message)):
        stages_of(*given)


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
    columns = ["train.training.learning_rate", "width", "eval_loss", "status"]
    points = table(folder).merge(table(folder, "sweep_points"), on="trial_id")
    return points.set_index("number").sort_index()[columns]


def test_a_search_that_is_continued_goes_on_as_if_it_had_not_ended(tmp_path):
    """A sweep for quality keeps the model of each trial."""
    assert run(tmp_path / "whole", *SEARCH, "sweep.samples=6") is None
    for samples in (3, 6):
        assert run(tmp_path / "parts", *SEARCH, f"sweep.samples={samples}") is None
        assert len(searched(tmp_path / "parts")) == samples
    pd.testing.assert_frame_equal(searched(tmp_path / "parts"), searched(tmp_path / "whole"))
    where = RunDirectory.at(tmp_path / "whole")
    assert all(where.exists(where.model(trial)) for trial in table(tmp_path / "whole")["trial_id"])
    ledger = Ledger(where, writable=False)
    done = stages_of(*SEARCH, "sweep.samples=6")[0].units
    more = stages_of(*SEARCH, "sweep.samples=7")[0].units
    assert [is_done(ledger, unit) for unit in [*done, *more]] == [True, False]
    with pytest.raises(ConfigError, match=r"sweep\.samples: stored 6, now 3"):
        run(tmp_path / "whole", *SEARCH, "sweep.samples=3")


def test_the_searchers_are_those_of_tune():
    with pytest.raises(ValueError, match="must be one of") as error:
        create_searcher("none")
    assert all(f"'{name}'" in str(error.value) for name in get_args(Searcher))


def test_a_larger_micro_batch_needs_more_unless_it_saves_the_gradients():
    given = (*ONLY, "sweep.constraints.effective_batch=8")
    found = config.resolve(config.parse(YAML, "c.yaml"), given, "auto", [HERE])
    two, four, eight = TrialMaker(found, found.settings.sweep, [HERE], None).trials()
    assert four.needs_more_than(two)
    assert not two.needs_more_than(four)
    assert not eight.needs_more_than(four)  # no accumulation
    both = stages_of(given[-1])[0]  # (4, 2) and (8, 1), each in two precisions
    assert len(both.units) - 1 == 2 * 2


def test_fit_finds_the_largest_micro_batch(monkeypatch, tmp_path):
    session, document = session_in(tmp_path), config.parse(YAML, "c.yaml")

    def fit(faults: str, *keys: str, stage: str | None = None) -> list[Row]:
        monkeypatch.setenv("RAYPIPE_FAULTS", faults)
        (maker,) = fitting(config.resolve(document, keys, "auto", [HERE]), stage, [HERE])
        return fit_stage(maker, session)

    rows = fit("oom:micro_batch>5")
    keys, most = ("precision", "micro_batch", "too_large", "accumulation"), (5, 6, 4)
    assert [tuple(row.get(key) for key in keys) for row in rows] == [
        *(("fp32", *most), ("tf32", None, None, None), ("bf16", *most), ("fp16", *most))
    ]
    assert [row.get("samples_per_s", 0) > 0 for row in rows] == [True, False, True, True]
    assert rows[1]["note"] == "this CPU lacks tf32"
    row = fit("")[0]
    assert (row["micro_batch"], row["accumulation"]) == (16, 1)
    assert "share of training.effective_batch" in row["note"]
    row = fit("oom:micro_batch>0")[0]
    assert (row["micro_batch"], row["note"]) == (None, "micro-batch 1 does not fit")
    row = fit("", "fail=true")[0]
    assert (row["failed"], row["note"]) == (True, "error: ConnectionError: the machine went away")
    with pytest.raises(ConfigError, match="--stage = 'x': must be a training stage"):
        fit("", stage="x")


def test_the_steps_of_a_stopped_trial_are_stored_though_its_worker_was_ended(tmp_path, monkeypatch):
    """The worker had stored step 5 when the scheduler ended it at step 10."""

    def trials_ended_early(self, trials, run):
        while (job := trials.next(pytest.fail)) is not None:
            rows = [{"trial_id": job.trial_id, "step": n, "loss": 1.0 / n} for n in (5, 10)]
            write_table(run, STEPS, rows[:1], job.run_id, job.trial_id)
            for row in rows:
                trials.report(job.trial_id, row)
            trials.stopped(job.trial_id)

    monkeypatch.setattr(InlineLauncher, "trials", trials_ended_early)
    run(tmp_path, *NONE, RATE, "sweep.kind=quality", "sweep.scheduler=asha")
    steps = table(tmp_path, "steps").groupby("trial_id")["step"].apply(list)
    assert list(steps.drop("train")) == [[5, 10]] * 2
    found = table(tmp_path)[["reason", "steps"]].to_numpy().tolist()
    assert found == [["stopped early by asha", 10]] * 2


def test_all_points_are_measured_once_then_all_again(tmp_path, monkeypatch) -> None:
    """At the speeds of a made-up machine."""
    train, sizes = InlineLauncher.train, list[int]()

    def measured(self: InlineLauncher, job: TrainingJob, *rest: Any) -> Any:
        if not job.measured:
            return train(self, job, *rest)
        sizes.append(job.plan.micro_batch)
        if len(sizes) == 4:  # rules out no larger one, which was measured before
            raise UnitError(job.trial_id, "out_of_memory", "none left")
        return train(self, job, *rest) | {"samples_per_s": 10.0 * sizes[-1] + len(sizes) % 2}

    monkeypatch.setattr(InlineLauncher, "train", measured)
    kept = ("sweep.constraints.effective_batch=8", "sweep.axes.training.micro_batch=[2,4,8,16]")
    assert run(tmp_path, *ONLY, "sweep.repeats=3", *kept) is None
    assert sizes == [2, 4, 8, 2, 4, 8, 4, 8]
    found = table(tmp_path)
    assert [(m, a) for m, _, a in trials(tmp_path).index] == [(2, 4), (4, 2), (8, 1)]
    assert set(found["effective_batch"]) == {8}
    assert list(found["repeats"].value_counts()) == [2, 2, 1]
    best = row_of(tmp_path, "recommendations")
    assert (best["value_low"], best["value"], best["value_high"]) == (80.0, 80.0, 81.0)
    assert best["settings"]["train.training.micro_batch"] == 8
