"""Configurations of the workloads: mistakes, identities of units, profiles by the card, sweeps.

Their tables: ``refusals.yaml``, ``identity.yaml`` (settings that decide a result, and those that do
not), ``profiles.yaml``.
"""

from __future__ import annotations

import shutil
from functools import reduce
from importlib import import_module
from operator import getitem

import pytest

import raypipe as rp
from experiments.lm_pretrain.model import large, medium
from experiments.pabbo_lda import optimizers
from raypipe.graph.configuration import Configuration
from raypipe.hardware import Gpu, Hardware
from raypipe.launch.inline import InlineLauncher
from tests.command import in_process, table
from tests.experiments.runs import CONFIGS, resolved, run
from tests.scenario import cases, named_cases

REFUSALS, IDENTITIES = cases(__file__, "refusals"), cases(__file__, "identity")
#: GiB that cards of 8, 10, 12, 16, 20, 24 (an L4), 24, 40, 48 and 80 GB report
CARDS = (7.99, 10.0, 12.0, 15.77, 19.7, 22.49, 23.69, 39.4, 47.5, 79.2)
SIZES = {"medium": medium().model_dump(mode="json"), "large": large().model_dump(mode="json")}


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [(model, *row) for model, rows in REFUSALS["settings"].items() for row in rows],
)
def test_settings_that_do_not_fit_together(model, values, message):
    module, _, name = model.rpartition(".")
    with pytest.raises(ValueError, match=message):
        getattr(import_module(module), name).model_validate(values)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        (name, *row)
        for name, rows in REFUSALS["commands"].items()
        for row in [[[], None], *rows["cases"]]
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_written(here, name, words, message):
    """Without a mistake there is a plan."""
    given = [CONFIGS / f"{name}.yaml", *REFUSALS["commands"][name]["given"], *words]
    verb, environment = "run" if message else "plan", {"RAYPIPE_CACHE": str(here / ".cache")}
    ended = in_process(InlineLauncher(), verb, *given, "--profile", "cpu", environment=environment)
    assert ended.status == (2 if message else 0), ended.output
    assert (message or "") in " ".join(ended.output.split())
    assert "Traceback" not in ended.output
    assert not (here / "runs").exists()


def on_card(
    name: str, *overrides: str, gib: float | None, capability: str = "8.9", profile: str = "auto"
) -> Configuration:
    """The configuration on a machine with a card of this size, or without one."""
    gpu = () if gib is None else (Gpu(0, "GPU-0", "card", int(gib * 2**30), capability),)
    node = Hardware("here", 2, 2**34, gpu)
    return resolved(name, *overrides, profile=profile, nodes=[node])


def prints(name: str, *words: str) -> dict[str, str]:
    """The fingerprint of each unit but those that are always computed again."""
    stages = resolved(name.split()[0], *IDENTITIES[name]["given"], *words).stages()
    units = [unit for s in stages if s.name not in ("hardware", "aggregate") for unit in s.units]
    return {unit.key: unit.fingerprint for unit in units}


def altered(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """The stages, and of studies the optimizers, of which units changed; none goes away."""
    keys = {key for key in before if before[key] != after[key]}
    return {key.split("/")[2] if key.startswith("lda/") else key for key in keys}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "words", "changed"),
    [(name, *row) for name, rows in IDENTITIES.items() for row in rows["changes"].items()],
)
def test_what_decides_a_result_is_its_identity(name, words, changed):
    assert altered(prints(name), prints(name, *words.split())) == set(changed)


def test_the_content_of_the_files_decides_and_not_their_place(here, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(here / "bow", copy)
    before = prints("pabbo_lda")
    assert prints("pabbo_lda", f"data.dir={copy}") == before
    shutil.copy(here / "bow/X_other_val_bow.npz", copy / "X_mine_val_bow.npz")
    after = prints("pabbo_lda", f"data.dir={copy}")
    assert altered(before, after) == {"ga", "pabbo_small", "pabbo_curves", "tpe"}


@pytest.mark.usefixtures("here")
def test_the_release_of_a_library_decides_a_study(monkeypatch):
    before = prints("pabbo_lda of two optimizers")
    monkeypatch.setattr(optimizers, "release", {"optuna": "4.8"}.get)
    assert altered(before, prints("pabbo_lda of two optimizers")) == {"tpe"}


@pytest.mark.parametrize("gib", [None, *CARDS])
@pytest.mark.parametrize("name", ["transformer", "lm_pretrain", "summarization"])
def test_the_swept_configuration_is_the_plain_one(name, gib):
    given = ["data.source=random"] if name == "lm_pretrain" else []
    swept, plain = on_card(f"sweeps/{name}", gib=gib), on_card(name, *given, gib=gib)
    assert swept.settings.model_copy(update={"sweep": None}) == plain.settings


@pytest.mark.parametrize(
    "case", cases(__file__, "profiles"), ids=lambda case: f"{case['config']} {case.get('gib')}"
)
def test_a_machine_has_the_sizes_of_its_profile(case):
    given = {name: case[name] for name in ("capability", "profile") if name in case}
    found = on_card(case["config"], *case.get("words", ()), gib=case.get("gib"), **given)
    settings = {"profile": found.profile, **found.settings.model_dump(mode="json")}
    expected = {k: SIZES[v] if k == "model" else v for k, v in case["gives"].items()}
    assert {name: reduce(getitem, name.split("."), settings) for name in expected} == expected


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("case", named_cases(__file__, "sweeps"))
def test_a_model_can_be_swept(tmp_path, case):
    words = (*case["words"], "sweep.repeats=1")
    assert run(f"sweeps/{case['name']}", tmp_path, *words, verb=rp.sweep) == 0
    rows = table(tmp_path, "trials")
    assert (len(rows), set(rows["status"])) == (case["points"], {"succeeded"})
    assert set(rows["precision"]) == {"fp32", "bf16"}
    assert rows["parity"].max() < 0.05
