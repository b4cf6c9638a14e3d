from __future__ import annotations

from pathlib import Path

import pytest

import raypipe as rp
from raypipe.commands import cluster
from raypipe.commands import configuration as config
from raypipe.graph.configuration import Configuration
from raypipe.hardware import Gpu, Hardware
from raypipe.launch.inline import InlineLauncher
from raypipe.store import tables as results
from raypipe.store.run_directory import RunDirectory

PROJECT = Path(__file__).resolve().parents[3]
PLAIN, SWEEP = PROJECT / "configs/transformer.yaml", PROJECT / "configs/sweeps/transformer.yaml"
#: GiB that cards of 8, 10, 12, 20, 24 (an L4), 24 and 48 GB report
CARDS = (7.99, 10.0, 12.0, 19.7, 22.49, 23.69, 47.5)
RANDOM = ["data.source=random", "data.samples=256", "data.held_out=64"]
SMALL = [*RANDOM, "model.hidden=16", "model.layers=2"]
TABLE = ["model.numeric=8", "model.categories=[5,5,5,5]"]
SEQUENCES = ["model.vocabulary=40", "model.length=12"]


def machine(gib: float | None, capability: str = "8.9") -> Hardware:
    gpu = () if gib is None else (Gpu(0, "GPU-0", "card", int(gib * 2**30), capability),)
    return Hardware("here", 2, 2**34, gpu)


def resolved(
    path: Path, *overrides: str, gib: float | None = None, capability: str = "8.9"
) -> Configuration:
    return config.resolve(config.read(path), overrides, "auto", [machine(gib, capability)])


@pytest.mark.parametrize(
    ("gib", "profile", "sizes"),
    [
        (None, "cpu", (128, 2, 32, 1)),
        *zip(
            CARDS,
            ["gpu_small", "gpu", "gpu", "gpu", "gpu_large", "gpu_large", "gpu_large"],
            [(128, 2, 8, 4), *[(256, 3, 16, 2)] * 3, *[(512, 6, 32, 1)] * 3],
            strict=True,
        ),
    ],
)
@pytest.mark.parametrize(("capability", "precision"), [("8.9", "bf16"), ("7.5", "fp16")])
def test_each_profile_has_its_sizes_and_the_same_effective_batch(
    gib, profile, sizes, capability, precision
):
    found = resolved(PLAIN, gib=gib, capability=capability)
    model, training = found.settings.model, found.settings.train.training
    on_gpu = profile != "cpu"
    assert found.profile == profile + "_bf16" * (on_gpu and precision == "bf16")
    assert training.precision == (precision if on_gpu else "fp32")
    assert sizes == (model.hidden, model.layers, training.micro_batch, training.accumulation)
    assert training.effective_batch == 32


def test_the_workload_s_sizes_for_a_cpu_are_a_profile():
    found = config.resolve(config.read(PLAIN), (), "cpu_large", [machine(None)]).settings
    training = found.train.training
    assert (found.model.hidden, found.model.layers) == (512, 6)
    assert (training.micro_batch, training.accumulation, training.precision) == (4, 8, "fp32")


@pytest.mark.parametrize("gib", [None, *CARDS])
def test_the_swept_configuration_is_the_plain_one(gib):
    swept, plain = resolved(SWEEP, gib=gib), resolved(PLAIN, gib=gib)
    assert swept.settings.model_copy(update={"sweep": None}) == plain.settings


@pytest.mark.parametrize("inputs", [TABLE, SEQUENCES], ids=["table", "sequences"])
def test_it_learns(tmp_path, monkeypatch, inputs):
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    training = ["train.training.epochs=8", "train.training.learning_rate=0.01"]
    training += ["train.training.warmup_steps=20"]
    given = [*SMALL, *inputs, *training]
    rp.run(PLAIN, given, run_dir=tmp_path / "run", profile="cpu")
    run = RunDirectory.at(tmp_path / "run")
    steps = results.read_table(run, "steps")
    row = results.read_table(run, "trials").iloc[0]
    assert (row["status"], row["steps"], len(steps)) == ("succeeded", 64, 7)
    assert row["eval_accuracy"] > 0.6
    assert steps["loss"].iloc[-1] < 0.9 * steps["loss"].iloc[0]


def test_it_can_be_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    given = [*SMALL, *TABLE, "sweep.repeats=1"]
    rp.sweep(SWEEP, given, run_dir=tmp_path / "run", profile="cpu")
    rows = results.read_table(RunDirectory.at(tmp_path / "run"), "trials")
    assert set(rows["status"]) == {"succeeded"}
    assert len(rows) == 12
