from __future__ import annotations

import math

import pytest

from experiments.lm_pretrain.export import check_exportable
from experiments.lm_pretrain.model import tiny
from raypipe.commands import configuration as config
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Unit
from tests.experiments.runs import CONFIGS, run, table

PLAIN = CONFIGS / "lm_pretrain.yaml"
SMALL = ["model.width=16", "model.heads=2", "model.layers=1", "model.feed_forward=16"]


def resolved(*overrides: str) -> Configuration:
    return config.resolve(config.read(PLAIN), overrides, "cpu", [])


def named(*overrides: str) -> dict[str, Unit]:
    """The unit of each stage."""
    found = resolved(*overrides).stages()
    return {stage.name: stage.units[0] for stage in found}


def test_a_cpu_trains_the_tiny_model():
    settings = resolved().settings
    changed = {"vocabulary": 2048, "context": 128, "tied": True}
    assert settings.model.model_dump() == {**tiny().model_dump(), **changed}
    assert settings.train.training.effective_batch == 8
    check_exportable(settings.model)


@pytest.mark.parametrize(
    ("override", "tokenized", "trained", "sampled"),
    [
        ("model.layers=2", False, True, True),
        ("model.vocabulary=500", True, True, True),
        ("data.tokens=bytes", True, True, True),
        ("data.held_out_share=0.2", True, True, True),
        ("data.validation_share=0.1", False, True, True),
        ("train.training.seed=1", False, True, True),
        ("sample.top_k=5", False, False, True),
        ("sample.prompt=line", False, False, True),
        ("export=true", False, False, False),
        ("data.samples=100", False, False, False),  # of random tokens
        ("train.training.gradient_checkpointing=true", False, False, False),
        ("train.training.micro_batch=4", False, False, False),
    ],
)
def test_what_decides_the_result_is_the_identity(override, tokenized, trained, sampled):
    before, after = named(), named(override)
    differ = {name: unit.fingerprint != after[name].fingerprint for name, unit in before.items()}
    assert differ == {
        "hardware": False,
        "tokenize": tokenized,
        "baselines": tokenized or "validation" in override,
        "train": trained,
        "evaluate": trained,
        "sample": sampled,
    }


def test_a_run_ends_at_the_entropy_of_its_tokens(tmp_path):
    given = ["data.source=random", "model.vocabulary=256", "data.held_out=64", *SMALL]
    steps = ["train.training.steps=40", "train.training.warmup_steps=4"]
    assert run("lm_pretrain", tmp_path, *given, *steps) == 0
    row = table(tmp_path, "trials").iloc[0]
    assert (row["status"], row["steps"]) == ("succeeded", 40)
    assert row["eval_loss"] == pytest.approx(math.log(256), abs=0.02)
