"""Identities of units: which settings decide a result, and which do not (``identity.yaml``)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.pabbo_lda import optimizers
from raypipe.commands import configuration as config
from tests.experiments.runs import CONFIGS
from tests.scenario import cases

TABLE = cases(__file__, "identity")


@pytest.fixture(autouse=True)
def _here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def prints(name: str, *words: str) -> dict[str, str]:
    """The fingerprint of each unit but those that are always computed again."""
    given = [*TABLE[name]["given"], *words]
    found = config.resolve(config.read(CONFIGS / f"{name}.yaml"), given, "cpu", [])
    stages = [stage for stage in found.stages() if stage.name not in ("hardware", "aggregate")]
    return {unit.key: unit.fingerprint for stage in stages for unit in stage.units}


def altered(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """The stages, and of studies the optimizers, of which units changed; none goes away."""
    keys = {key for key in before if before[key] != after[key]}
    return {key.split("/")[2] if key.startswith("lda/") else key for key in keys}


@pytest.mark.parametrize(
    ("name", "words", "changed"),
    [(name, *row) for name, table in TABLE.items() for row in table["changes"].items()],
)
def test_what_decides_a_result_is_its_identity(name, words, changed):
    assert altered(prints(name), prints(name, *words.split())) == set(changed)


def test_the_content_of_the_files_decides_and_not_their_place(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree("bow", copy)
    before = prints("pabbo_lda")
    assert prints("pabbo_lda", f"data.dir={copy}") == before
    shutil.copy("bow/X_other_val_bow.npz", copy / "X_mine_val_bow.npz")
    after = prints("pabbo_lda", f"data.dir={copy}")
    assert altered(before, after) == {"ga", "pabbo_small", "pabbo_curves", "tpe"}


def test_the_ranges_of_priors_and_the_release_of_a_library_decide_a_study(monkeypatch):
    two = "lda.optimizers=[ga,tpe]"
    before = prints("pabbo_lda", two)
    priors = ("lda.alpha=[0.1,1.0]", "lda.eta=[0.2,1.0]")
    for prior in priors:
        assert altered(before, prints("pabbo_lda", two, prior)) == {"ga", "tpe"}
    monkeypatch.setattr(optimizers, "release", {"optuna": "4.8"}.get)
    assert altered(before, prints("pabbo_lda", two)) == {"tpe"}
