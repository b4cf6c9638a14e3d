"""A training that starts from another run's weights: they are its identity, wherever they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from example_tasks import HeldOut
from safetensors.torch import load

from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import Ended, in_process

CONFIG = """
experiment: continuing
train:
  training: {steps: 4, effective_batch: 16, micro_batch: 8, log_every: 1}
  scaling: {cpus_per_worker: 1}
"""

Run = Callable[..., Ended]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the training alone, in a run directory of a name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)

    def run(folder: str, *words: str, expected: int = 0) -> Ended:
        ended = in_process(
            InlineLauncher(), "run", "c.yaml", *words, "--only", "train", "--run-dir", folder,
            environment={"RAYPIPE_CACHE": str(tmp_path / "cache")},
        )  # fmt: skip
        assert ended.status == expected, ended.output
        return ended

    return run


def weights(folder: str) -> dict[str, torch.Tensor]:
    run = RunDirectory.at(folder)
    return load(run.read(run.model("train")))


def test_the_training_starts_from_the_weights_of_the_other(
    command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a learning rate of almost zero they stay; the run says where they came from."""
    command("first")
    tiny = ("train.training.learning_rate=1e-30", "train.training.seed=7")
    command("second", "train.training.init_from=first", *tiny)
    first, second = weights("first"), weights("second")
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=1e-12)
    (trial,) = read_table(RunDirectory.at("second"), "trials").to_dict("records")
    assert trial["init_from"] == f"{Path('first').resolve()}/train"
    assert len(trial["init_sha256"]) == 64


def test_the_identity_is_the_weights_and_not_their_place(command: Run) -> None:
    command("first")
    command("second", "train.training.init_from=first")
    shutil.copytree("first", "moved")
    for place in ("moved", "moved/train", str(Path("moved").resolve())):
        assert "nothing to do" in command("second", f"train.training.init_from={place}").output
    command("other", "train.training.seed=1")
    ended = command("second", "train.training.init_from=other", expected=2)
    assert "training.init_from: stored" in ended.output
    ended = command("second", expected=2)
    assert "training.init_from: stored" in ended.output


def test_one_training_can_start_from_another_stage(command: Run) -> None:
    command("first")
    Path("first/models/train.safetensors").rename("first/models/pretrain.safetensors")
    ended = command("second", "train.training.init_from=first", expected=2)
    assert "no trained model 'train' in this run directory (it has pretrain)" in ended.output
    command("second", "train.training.init_from=first/pretrain")


def test_places_without_a_model_are_refused(command: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("empty", "empty/train", "missing", "c.yaml"):
        ended = command("run", f"train.training.init_from={place}", expected=2)
        assert "c.yaml: train.training.init_from" in ended.output
        assert not Path("run").exists()
    command("first")
    model = Path("first/models/train.safetensors")
    content = bytearray(model.read_bytes())
    content[-1] ^= 1  # only the worker reads the weights
    model.write_bytes(content)
    ended = command("second", "train.training.init_from=first", expected=1)
    assert "missing or damaged" in ended.output
    model.write_bytes(b"\xff" * 100)
    ended = command("run", "train.training.init_from=first", expected=2)
    assert "cannot be read" in ended.output


def test_weights_that_do_not_fit_are_refused_with_their_names(
    command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("first")

    def build_model(self: HeldOut) -> torch.nn.Module:
        small = torch.nn.ModuleDict({"0": torch.nn.Linear(5, 6), "head": torch.nn.Linear(6, 1)})
        return small.double()

    monkeypatch.setattr(HeldOut, "build_model", build_model)
    ended = command("second", "train.training.init_from=first", expected=2)
    assert 'Missing key(s) in state_dict: "head.weight", "head.bias"' in ended.output
    assert 'Unexpected key(s) in state_dict: "3.bias", "3.weight"' in ended.output
    assert "size mismatch for 0.weight" in ended.output
    assert not Path("second").exists()
