"""Identities of the main job's units: which settings decide a result, and which do not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from experiments.pabbo_lda import optimizers
from experiments.pabbo_lda.experiment import EXPERIMENT
from raypipe.graph.configuration import compose
from raypipe.graph.experiment import Unit

NAMES = ("ga", "pabbo_small", "pabbo_curves", "tpe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    for name, seed in (("one", 1), ("two", 2)):
        counts = np.random.default_rng(seed).integers(0, 3, (20, 60))
        sparse.save_npz(folder / f"X_{name}_val_bow.npz", sparse.csr_matrix(counts))
    return folder


def units(folder: Path, **sections: dict[str, Any]) -> dict[str, Unit]:
    """The units of all stages by key; sections are changed as given."""
    lda = {"datasets": ["one"], "optimizers": NAMES, "runs": 2, "t_max": 50, "start": [9, 30]}
    plain = {
        **sections,
        "data": {"source": "bow", "dir": folder, **sections.get("data", {})},
        "lda": {**lda, **sections.get("lda", {})},
    }
    settings = EXPERIMENT.settings.model_validate(plain)
    stages = compose(EXPERIMENT, settings, EXPERIMENT.stages(settings))
    return {unit.key: unit for stage in stages for unit in stage.units if stage.name != "aggregate"}


def prints(found: dict[str, Unit]) -> dict[str, str]:
    return {key: unit.fingerprint for key, unit in found.items()}


def changed(folder: Path, **sections: dict[str, Any]) -> set[str]:
    """The names of stages and optimizers of which a change alters units; none goes away."""
    before, after = prints(units(folder)), prints(units(folder, **sections))
    assert before.keys() == after.keys()
    keys = {key for key in before if before[key] != after[key]}
    return {key.split("/")[2] if "/" in key else key for key in keys}


@pytest.mark.parametrize(
    "lda",
    [
        {"runs": 3},
        {"datasets": ["two", "one"]},
        {"optimizers": ["random", *reversed(NAMES), "pabbo_large"]},
        {"evaluations": 90},
    ],
)
def test_more_of_anything_only_adds_units(folder, lda):
    before, after = units(folder), units(folder, lda=lda)
    assert prints(before).items() <= prints(after).items()
    assert len(after) > len(before) or after["lda/one/ga/0"].budget > before["lda/one/ga/0"].budget


@pytest.mark.parametrize(
    "sections",
    [
        {"lda": {"cpus": 0.5, "time_limit_s": 9.0, "attempts": 1, "cache": False}},
        {"train_small": {"pabbo": {"evaluation": {"functions": 3}}}},
        {"train_curves": {"pabbo": {"held_out": 3}}},
    ],
)
def test_operational_settings_change_nothing(folder, sections):
    assert changed(folder, **sections) == set()


def test_the_content_of_the_files_decides_and_not_their_place(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert prints(units(copy)) == prints(units(folder))
    shutil.copy(folder / "X_two_val_bow.npz", copy / "X_one_val_bow.npz")
    before, after = prints(units(folder)), prints(units(copy))
    altered = {key for key in before if before[key] != after[key]}
    assert {key.split("/")[0] for key in altered} == {"lda"}
    assert len(altered) == 2 * len(NAMES)


def test_only_optimizers_with_a_model_depend_on_its_training(folder):
    small = {"train_small", "evaluate_small", "pabbo_small"}
    assert changed(folder, train_small={"pabbo": {"horizon": 9}}) == small
    assert changed(folder, train_small={"training": {"steps": 9}}) == small
    assert changed(folder, train_curves={"pabbo": {"steps": 9}}) == {"train_curves", "pabbo_curves"}
    assert changed(folder, lda={"policy": {"exploration": 0.1}}) == {"pabbo_small"}
    assert changed(folder, evaluate_small={"steps": 9}) == {"evaluate_small"}


@pytest.mark.parametrize(
    "lda",
    [
        *({"seed": 43}, {"t_min": 3}, {"t_max": 40}, {"start": [9, 31]}, {"iterations": 5}),
        *({"max_iter": 5}, {"batch_size": 64}, {"precision": "float32"}),
        {"objective": "coherence"},
    ],
)
def test_every_other_setting_decides_a_study(folder, lda):
    assert changed(folder, lda=lda) == set(NAMES)


def test_the_ranges_of_priors_and_the_release_of_a_library_decide_a_study(folder, monkeypatch):
    before = units(folder, lda={"optimizers": ["ga", "tpe"]})
    after = units(folder, lda={"optimizers": ["ga", "tpe"], "alpha": [0.1, 1.0], "eta": [0.2, 1.0]})
    first, second = (found["lda/one/ga/0"].identity for found in (before, after))
    assert second.differences(first.record(), dict(first.shared)) == {
        "lda.alpha": (None, [0.1, 1.0]),
        "lda.eta": (None, [0.2, 1.0]),
    }
    assert before["lda/one/tpe/0"].literals["libraries"].keys() == {"optuna"}
    monkeypatch.setattr(optimizers, "release", {"optuna": "4.8"}.get)
    after = units(folder, lda={"optimizers": ["ga", "tpe"]})
    altered = {key for key in before if before[key].fingerprint != after[key].fingerprint}
    assert altered == {"lda/one/tpe/0", "lda/one/tpe/1"}
