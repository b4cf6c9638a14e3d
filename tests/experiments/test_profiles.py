"""Profiles of the workloads, by the card (table: ``profiles.yaml``)."""

from __future__ import annotations

from functools import reduce
from operator import getitem

import pytest

import raypipe as rp
from experiments.lm_pretrain.model import large, medium
from raypipe.commands import configuration as config
from raypipe.graph.configuration import Configuration
from raypipe.hardware import Gpu, Hardware
from tests.command import table
from tests.experiments.runs import CONFIGS, run
from tests.scenario import cases

#: GiB that cards of 8, 10, 12, 16, 20, 24 (an L4), 24, 40, 48 and 80 GB report
CARDS = (7.99, 10.0, 12.0, 15.77, 19.7, 22.49, 23.69, 39.4, 47.5, 79.2)
SIZES = {"medium": medium().model_dump(mode="json"), "large": large().model_dump(mode="json")}


def machine(gib: float | None, capability: str = "8.9") -> Hardware:
    gpu = () if gib is None else (Gpu(0, "GPU-0", "card", int(gib * 2**30), capability),)
    return Hardware("here", 2, 2**34, gpu)


def resolved(
    name: str,
    *overrides: str,
    gib: float | None = None,
    capability: str = "8.9",
    profile: str = "auto",
) -> Configuration:
    document = config.read(CONFIGS / f"{name}.yaml")
    return config.resolve(document, overrides, profile, [machine(gib, capability)])


@pytest.mark.parametrize("gib", [None, *CARDS])
@pytest.mark.parametrize("name", ["transformer", "lm_pretrain", "summarization"])
def test_the_swept_configuration_is_the_plain_one(name, gib):
    given = ["data.source=random"] if name == "lm_pretrain" else []
    swept, plain = resolved(f"sweeps/{name}", gib=gib), resolved(name, *given, gib=gib)
    assert swept.settings.model_copy(update={"sweep": None}) == plain.settings


@pytest.mark.parametrize(
    "case", cases(__file__, "profiles"), ids=lambda case: f"{case['config']} {case.get('gib')}"
)
def test_a_machine_has_the_sizes_of_its_profile(case):
    given = {name: case[name] for name in ("gib", "capability", "profile") if name in case}
    found = resolved(case["config"], *case.get("words", ()), **given)
    settings = {"profile": found.profile, **found.settings.model_dump(mode="json")}
    expected = {k: SIZES[v] if k == "model" else v for k, v in case["gives"].items()}
    assert {name: reduce(getitem, name.split("."), settings) for name in expected} == expected


def test_parts_of_a_size_can_be_changed():
    tied = resolved("lm_pretrain", "model.tied=true", gib=24).settings.model
    assert tied.model_dump() == medium().model_copy(update={"tied": True}).model_dump()


SWEPT = {
    "transformer": [
        *["data.source=random", "data.samples=256", "data.held_out=64", "model.hidden=16"],
        *["model.layers=2", "model.numeric=8", "model.categories=[5,5,5,5]"],
    ],
    "lm_pretrain": ["model.width=16", "model.heads=2", "model.layers=1", "model.feed_forward=16"],
}


@pytest.mark.parametrize(
    "name", ["transformer", pytest.param("lm_pretrain", marks=pytest.mark.slow)]
)
def test_a_model_can_be_swept(tmp_path, name):
    words = (*SWEPT[name], "sweep.repeats=1")
    assert run(f"sweeps/{name}", tmp_path, *words, verb=rp.sweep) == 0
    rows = table(tmp_path, "trials")
    assert (len(rows), set(rows["status"])) == (12, {"succeeded"})
    assert rows["parity"].max() < 0.05
