"""The files beside the code."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raypipe.commands import configuration as config
from raypipe.hardware import Gpu, Hardware

PROJECT = Path(__file__).resolve().parents[1]
CPU = Hardware("a", 2, 2**34)
GPU = Hardware("b", 16, 2**37, (Gpu(0, "GPU-0", "card", 24 * 2**30, "8.6"),))


each_configuration = pytest.mark.parametrize(
    "path", sorted((PROJECT / "configs").rglob("*.yaml")), ids=lambda p: p.stem
)


@each_configuration
@pytest.mark.parametrize(("node", "profile"), [(CPU, "cpu"), (GPU, "gpu")])
def test_every_configuration_is_valid_on_every_kind_of_machine(path, node, profile, monkeypatch):
    monkeypatch.chdir(PROJECT)
    found = config.resolve(config.read(path), (), "auto", [node])
    assert found.profile.startswith(profile)
    again = config.parse(yaml.safe_dump(found.resolved()), "resolved")
    assert config.resolve(again, (), "auto", [CPU]).settings == found.settings


@each_configuration
@pytest.mark.parametrize("gb", [8, 11, 16, 24, 48])
def test_no_profile_takes_an_arithmetic_that_older_cards_lack(path, gb, monkeypatch):
    monkeypatch.chdir(PROJECT)
    node = Hardware("c", 16, 2**37, (Gpu(0, "GPU-0", "card", gb * 10**9, "7.5"),))
    settings = config.resolve(config.read(path), (), "auto", [node]).settings
    sections = [section for _, section in settings]
    sections += [training for section in sections if (training := getattr(section, "training", 0))]
    taken = {getattr(section, "precision", None) for section in sections}
    assert taken.isdisjoint({"tf32", "bf16"})


def test_the_main_configuration_has_the_published_sizes(monkeypatch):
    monkeypatch.chdir(PROJECT)
    document = config.read(PROJECT / "configs/pabbo_lda.yaml")
    for node, sizes in (
        (CPU, (2000, 16, 8000, 32, 20, 256)),
        (GPU, (4000, 32, 12000, 64, 50, 512)),
    ):
        settings = config.resolve(document, (), "auto", [node]).settings
        small, large = settings.train_small, settings.train_large
        assert sizes == (
            *(small.training.steps, small.training.effective_batch),
            *(large.training.steps, large.training.effective_batch),
            *(large.pabbo.max_context, settings.evaluate_large.query_points),
        )
