"""Profiles of the transformer, the language model and the summarizer, by the card."""

from __future__ import annotations

import pytest

import raypipe as rp
from experiments.lm_pretrain.model import large, medium
from raypipe.commands import configuration as config
from raypipe.graph.configuration import Configuration
from raypipe.hardware import Gpu, Hardware
from tests.experiments.runs import CONFIGS, run, table

#: GiB that cards of 8, 10, 12, 16, 20, 24 (an L4), 24, 40, 48 and 80 GB report
CARDS = (7.99, 10.0, 12.0, 15.77, 19.7, 22.49, 23.69, 39.4, 47.5, 79.2)


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
    ("gib", "profile", "sizes"),
    [
        (None, "cpu", (128, 2, 32, 1)),
        (7.99, "gpu_small", (128, 2, 8, 4)),
        *[(gib, "gpu", (256, 3, 16, 2)) for gib in (10.0, 12.0, 19.7)],
        *[(gib, "gpu_large", (512, 6, 32, 1)) for gib in (22.49, 23.69, 47.5)],
    ],
)
@pytest.mark.parametrize(("capability", "precision"), [("8.9", "bf16"), ("7.5", "fp16")])
def test_transformers_have_their_sizes_and_the_same_effective_batch(
    gib, profile, sizes, capability, precision
):
    found = resolved("transformer", gib=gib, capability=capability)
    model, training = found.settings.model, found.settings.train.training
    on_gpu = profile != "cpu"
    assert found.profile == profile + "_bf16" * (on_gpu and precision == "bf16")
    assert training.precision == (precision if on_gpu else "fp32")
    assert sizes == (model.hidden, model.layers, training.micro_batch, training.accumulation)
    assert training.effective_batch == 32


def test_the_transformer_s_sizes_for_a_cpu_are_a_profile():
    found = resolved("transformer", profile="cpu_large").settings
    training = found.train.training
    assert (found.model.hidden, found.model.layers) == (512, 6)
    assert (training.micro_batch, training.accumulation, training.precision) == (4, 8, "fp32")


@pytest.mark.parametrize(
    ("gib", "batches"),
    [(7.99, (2, 64)), (12.0, (4, 32)), (23.69, (8, 16))]
    + [(gib, (16, 8)) for gib in (39.4, 47.5, 79.2)],
)
def test_the_effective_batch_of_language_models_is_128_on_every_card(gib, batches):
    settings = resolved("lm_pretrain", gib=gib).settings
    training = settings.train.training
    assert (training.micro_batch, training.accumulation) == batches
    assert training.effective_batch == 128
    assert settings.model.model_dump() == medium().model_dump()
    assert (training.steps, training.warmup_steps, training.betas) == (100_000, 4000, (0.9, 0.95))


def test_a_language_model_is_a_size_or_its_parts():
    found = resolved("lm_pretrain", "model=large").settings.model
    assert found.model_dump() == large().model_dump()
    tied = resolved("lm_pretrain", "model.tied=true", gib=24).settings.model
    assert tied.model_dump() == medium().model_copy(update={"tied": True}).model_dump()


@pytest.mark.parametrize(("card", "micro"), [("24gb", 1), ("40gb", 4), ("80gb", 8)])
@pytest.mark.parametrize("name", ["lm_pretrain", "sweeps/lm_pretrain"])
def test_the_large_language_model_has_profiles_that_fit(name, card, micro):
    """Measured on stand-in libraries; the profile of the card is for the medium size."""
    found = resolved(name, gib=40, profile=f"large_{card}").settings
    training = found.train.training
    assert found.model.width == 1280
    assert (training.micro_batch, training.precision) == (micro, "bf16")
    assert training.effective_batch == 128


@pytest.mark.parametrize(
    ("gib", "profile", "batches", "precision"),
    [
        (None, "cpu", (16, 1, 64, 32), "fp32"),
        (7.99, "gpu", (1, 2, 1, 1), "fp32"),
        (10.0, "gpu_10gb", (2, 1, 4, 4), "bf16"),
        (15.77, "gpu_16gb", (4, 2, 4, 8), "fp32"),
        (23.69, "gpu_24gb", (4, 2, 4, 8), "bf16"),
        (39.4, "gpu_40gb", (8, 2, 8, 16), "bf16"),
    ],
)
def test_summarizers_have_the_sizes_of_their_card(gib, profile, batches, precision):
    configuration = resolved("summarization", gib=gib)
    settings = configuration.settings
    training = settings.train.training
    sizes = (training.micro_batch, training.accumulation, training.eval_batch)
    assert (configuration.profile, training.precision) == (profile, precision)
    assert (*sizes, settings.generation.batch) == batches
    assert training.effective_batch == batches[0] * batches[1]


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
