from __future__ import annotations

import math
from pathlib import Path

import pytest

import raypipe as rp
from experiments.lm_pretrain.export import check_exportable
from experiments.lm_pretrain.model import large, medium, tiny
from raypipe.commands import cluster
from raypipe.commands import configuration as config
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Unit
from raypipe.hardware import Gpu, Hardware
from raypipe.launch.inline import InlineLauncher
from raypipe.store import tables as results
from raypipe.store.run_directory import RunDirectory

PROJECT = Path(__file__).resolve().parents[3]
PLAIN, SWEEP = PROJECT / "configs/lm_pretrain.yaml", PROJECT / "configs/sweeps/lm_pretrain.yaml"
#: GiB that cards of 8, 12, 24, 40, 48 and 80 GB report
CARDS = (7.99, 12.0, 23.69, 39.4, 47.5, 79.2)
SMALL = ["model.width=16", "model.heads=2", "model.layers=1", "model.feed_forward=16"]


def machine(gib: float | None) -> Hardware:
    gpu = () if gib is None else (Gpu(0, "GPU-0", "card", int(gib * 2**30), "8.9"),)
    return Hardware("here", 2, 2**34, gpu)


def resolved(path: Path, *overrides: str, gib: float | None = None) -> Configuration:
    return config.resolve(config.read(path), overrides, "auto", [machine(gib)])


def unit(*overrides: str) -> Unit:
    return named(*overrides)["train"]


def named(*overrides: str, path: Path = PLAIN) -> dict[str, Unit]:
    """The unit of each stage."""
    found = resolved(path, *overrides).stages()
    return {stage.name: stage.units[0] for stage in found}


@pytest.mark.parametrize(
    ("gib", "batches"),
    list(zip(CARDS, [(2, 64), (4, 32), (8, 16), (16, 8), (16, 8), (16, 8)], strict=True)),
)
def test_the_effective_batch_is_128_on_every_card(gib, batches):
    settings = resolved(PLAIN, gib=gib).settings
    training = settings.train.training
    assert (training.micro_batch, training.accumulation) == batches
    assert training.effective_batch == 128
    assert settings.model.model_dump() == medium().model_dump()
    assert (training.steps, training.warmup_steps, training.betas) == (100_000, 4000, (0.9, 0.95))


def test_a_cpu_trains_the_tiny_model():
    settings = resolved(PLAIN).settings
    changed = {"vocabulary": 2048, "context": 128, "tied": True}
    assert settings.model.model_dump() == {**tiny().model_dump(), **changed}
    assert settings.train.training.effective_batch == 8
    check_exportable(settings.model)


def test_a_model_is_a_size_or_its_parts():
    assert resolved(PLAIN, "model=large").settings.model.model_dump() == large().model_dump()
    tied = resolved(PLAIN, "model.tied=true", gib=24).settings.model
    assert tied.model_dump() == medium().model_copy(update={"tied": True}).model_dump()
    with pytest.raises(ConfigError, match=r"model = 'medum': must be a size \(tiny, medium, large"):
        resolved(PLAIN, "model=medum")


@pytest.mark.parametrize("gib", [None, *CARDS])
def test_the_swept_configuration_is_the_plain_one_on_random_tokens(gib):
    swept, plain = resolved(SWEEP, gib=gib), resolved(PLAIN, "data.source=random", gib=gib)
    assert swept.settings.model_copy(update={"sweep": None}) == plain.settings


@pytest.mark.parametrize(("name", "micro"), [("24gb", 1), ("40gb", 4), ("80gb", 8)])
def test_the_large_size_has_profiles_that_fit(name, micro):
    """Measured on stand-in libraries; the profile of the card is for the medium size."""
    for path in (PLAIN, SWEEP):
        found = config.resolve(config.read(path), [], f"large_{name}", [machine(40)]).settings
        training = found.train.training
        assert found.model.width == 1280
        assert (training.micro_batch, training.precision) == (micro, "bf16")
        assert training.effective_batch == 128


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


def test_a_run_ends_at_the_entropy_of_its_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    overrides = [
        *[*SMALL, "data.source=random", "model.vocabulary=256", "data.held_out=64"],
        *["train.training.steps=40", "train.training.warmup_steps=4"],
    ]
    rp.run(PLAIN, overrides, run_dir=tmp_path / "run", profile="cpu")
    row = results.read_table(RunDirectory.at(tmp_path / "run"), "trials").iloc[0]
    assert (row["status"], row["steps"]) == ("succeeded", 40)
    assert row["eval_loss"] == pytest.approx(math.log(256), abs=0.02)


def test_it_can_be_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    rp.sweep(SWEEP, [*SMALL, "sweep.repeats=1"], run_dir=tmp_path / "run", profile="cpu")
    rows = results.read_table(RunDirectory.at(tmp_path / "run"), "trials")
    assert (len(rows), set(rows["status"])) == (12, {"succeeded"})
    assert rows["parity"].max() < 1e-3
