"""Population-based training: who takes over from whom, and that it can be interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config.axes import AxisSettings
from raypipe.errors import ConfigError
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import read_partition, read_table
from raypipe.sweep.population import explored
from raypipe.sweep.sweep import Sweep
from tests.raypipe.examples import sweeping

YAML = """
experiment: example_sweep
train:
  training: {steps: 40, effective_batch: 16, micro_batch: 16, log_every: 5, schedule: cosine}
sweep:
  stage: train
  kind: quality
  scheduler: pbt
  metric: eval_loss
  grace_steps: 10
  samples: 5
  axes:
    training.learning_rate: {low: 1.0e-4, high: 0.3, log: true}
    training.weight_decay: {choice: [0.0, 0.01, 0.1]}
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("population")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYPIPE_CACHE", str(folder / "cache"))
        assert sweeping.sweep(YAML, folder / "run") is None
    return folder / "run"


def parts(folder: Path) -> pd.DataFrame:
    table = sweeping.with_points(RunDirectory.at(folder))
    table = table[table["stage"] == "sweep"].set_index("trial_id")
    return table.sort_values(["generation", "member"])


def losses(folder: Path, trial_id: str) -> pd.Series[Any]:
    return read_partition(RunDirectory.at(folder), "steps", trial_id).set_index("step")["loss"]


def test_the_worst_go_on_from_the_best(whole):
    table = parts(whole)
    assert len(table) == 4 * 5
    assert set(table["status"]) == {"succeeded"}
    for generation in range(1, 4):
        before, now = (table[table["generation"] == g] for g in (generation - 1, generation))
        ranked = before["eval_loss"].sort_values().index
        best, going_on = set(ranked[:2]), set(ranked[:3])
        for (trial_id, row), former in zip(now.iterrows(), before.index, strict=True):
            if former in going_on:
                assert row["parent"] == former, trial_id
                assert row["point"] == before.loc[former, "point"]
            else:
                assert row["parent"] in best
                assert row["point"] != before.loc[row["parent"], "point"]


def test_a_larger_population_trains_members_of_its_own(tmp_path):
    short = ("train.training.steps=20",)
    for samples in (4, 7):
        assert sweeping.sweep(YAML, tmp_path, (*short, f"sweep.samples={samples}")) is None
    assert len(parts(tmp_path)) == 2 * (4 + 7)


def test_a_part_goes_on_where_its_parent_ended(whole):
    """Member 0 of the generations as one training, where its settings never changed."""
    table = parts(whole)
    last = table[(table["generation"] == 3)]
    steady = []
    for trial_id in last.index:
        chain = [trial_id]
        while table.loc[chain[0], "generation"]:
            chain.insert(0, table.loc[chain[0], "parent"])
        if len({table.loc[part, "point"] for part in chain}) == 1:
            steady.append(chain)
    chain = steady[0]
    found = pd.concat([losses(whole, part) for part in chain])
    assert list(found.index) == list(range(5, 41, 5))
    alone = YAML.replace("scheduler: pbt", "").replace("metric: eval_loss", "")
    point = Ledger(RunDirectory.at(whole), writable=False).get("trials", chain[0])["point"]
    axes = tuple(
        f"sweep.axes.{key.removeprefix('train.')}=[{value}]" for key, value in point.items()
    )
    folder, last = whole.parent / "alone", ["train.training.monitor=null"]
    assert sweeping.sweep(alone, folder, (*axes, "sweep.grace_steps=null", *last)) is None
    (trial_id,) = read_table(RunDirectory.at(folder), "pareto")["trial_id"]
    pd.testing.assert_series_equal(found, losses(folder, trial_id), rtol=1e-12)


def test_a_sweep_that_is_cut_short_goes_on_as_if_it_had_not(whole, tmp_path, monkeypatch):
    ended = Sweep.ended
    left = 7

    def die_after_some(self: Sweep, trial_id: str, outcome: Any) -> None:
        nonlocal left
        ended(self, trial_id, outcome)
        left -= 1
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "ended", die_after_some)
    with pytest.raises(KeyboardInterrupt):
        sweeping.sweep(YAML, tmp_path / "run")
    assert len(parts_of_ledger(tmp_path / "run")) == 7
    monkeypatch.setattr(Sweep, "ended", ended)
    assert sweeping.sweep(YAML, tmp_path / "run") is None
    columns = ["generation", "member", "parent", "point", "status", "loss_final", "eval_loss"]
    pd.testing.assert_frame_equal(parts(tmp_path / "run")[columns], parts(whole)[columns])


def parts_of_ledger(folder: Path) -> list[Any]:
    return Ledger(RunDirectory.at(folder), writable=False).rows("trials")


def test_the_recommendation_is_of_the_last_generation_and_nothing_is_left(whole):
    table, run = parts(whole), RunDirectory.at(whole)
    (row,) = Ledger(run, writable=False).rows("recommendations")
    last = table[table["generation"] == 3]
    assert row["trial_id"] == last["eval_loss"].idxmin() or row["value"] <= (
        1.02 * last["eval_loss"].min()
    )
    assert run.exists(run.model(row["trial_id"]))
    assert len([name for name in run.list(run.path("models")) if "sweep" in name]) == 5
    assert not [name for name in run.list(run.path("checkpoints")) if "sweep" in name]


def test_a_member_whose_loss_is_no_number_is_taken_over(tmp_path):
    wild = ("sweep.axes.training.learning_rate={choice: [1.0e+18, 0.01]}", "sweep.seed=1")
    text = YAML.replace("schedule: cosine", "schedule: constant")
    assert sweeping.sweep(text, tmp_path, wild) is None
    table = parts(tmp_path)
    first = table[table["generation"] == 0]
    failed = first.index[first["status"] == "failed"]
    assert 0 < len(failed) < 5
    second = table[table["generation"] == 1].set_index("member")
    for number in first.loc[failed, "member"]:
        assert second.loc[number, "parent"] not in failed
    assert (table["status"][table["generation"] > 0] == "failed").any()
    assert not [name for name in (tmp_path / "checkpoints").iterdir() if "sweep" in name.name]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sweep.axes.width={choice: [2, 4]}", "sweep.axes: width: scheduler = pbt changes it"),
        ("sweep.axes.training.learning_rate=[0.1]", "is a grid"),
        (
            "train.training={eval_every: 5, monitor: {patience: 2}}",
            "train.training.monitor.patience",
        ),
    ],
)
def test_what_cannot_change_on_the_way_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        sweeping.stages_of(YAML, (override,))


@given(
    st.integers(0, 2**32 - 1),
    st.floats(1e-5, 0.3),
    st.integers(1, 64),
    st.sampled_from([0.0, 0.01, 0.1]),
)
def test_what_is_explored_stays_within_its_axes(seed, rate, number, decay):
    axes = {
        "rate": AxisSettings(low=1e-5, high=0.3, log=True),
        "number": AxisSettings(low=1, high=64),
        "decay": AxisSettings(choice=(0.0, 0.01, 0.1)),
    }
    point = {"rate": rate, "number": number, "decay": decay}
    found = explored(axes, point, np.random.default_rng(seed))
    assert found.keys() == axes.keys()
    assert 1e-5 <= found["rate"] <= 0.3
    assert isinstance(found["number"], int)
    assert 1 <= found["number"] <= 64
    assert found["decay"] in (0.0, 0.01, 0.1)
