"""A training that starts from another run's weights: they are its identity, wherever they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from example_tasks import HeldOut
from safetensors.torch import load

from raypipe.store.run_directory import RunDirectory
from tests import scenario
from tests.command import raypipe, table

CASES = scenario.cases(__file__, "initial_weights")


def run(folder: str, *words: str, expected: int = 0) -> str:
    """Run the training alone, in a run directory of a name."""
    command = ("run", "c.yaml", *words, "--only", "train", "--run-dir", folder)
    return raypipe(*command, expected=expected)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration and the run that others start from."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copy(Path(__file__).with_name("continuing.yaml"), folder / "c.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RAYPIPE_CACHE", str(folder / "cache"))
        run("first")
    shutil.copytree(folder / "first", folder / "moved")
    return folder


@pytest.fixture(autouse=True)
def copied(trained: Path, folder: Path) -> None:
    """Work in a copy of that folder."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)


def weights(folder: str) -> dict[str, torch.Tensor]:
    run = RunDirectory.at(folder)
    return load(run.read(run.model("train")))


def test_the_training_starts_from_the_weights_of_the_other() -> None:
    """At a learning rate of almost zero they stay; the run says where they came from."""
    tiny = ("train.training.learning_rate=1e-30", "train.training.seed=7")
    run("second", "train.training.init_from=first", *tiny)
    first, second = weights("first"), weights("second")
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=1e-12)
    (trial,) = table("second", "trials").to_dict("records")
    assert trial["init_from"] == f"{Path('first').resolve()}/train"
    assert len(trial["init_sha256"]) == 64


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_commands(case: scenario.Step) -> None:
    scenario.play(case["commands"], here=str(Path.cwd()))


def test_a_damaged_model_is_refused_by_the_worker_that_reads_it() -> None:
    model = Path("first/models/train.safetensors")
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    output = run("second", "train.training.init_from=first", expected=1)
    assert "missing or damaged" in output


def test_weights_that_do_not_fit_are_refused_with_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build_model(self: HeldOut) -> torch.nn.Module:
        small = torch.nn.ModuleDict({"0": torch.nn.Linear(5, 6), "head": torch.nn.Linear(6, 1)})
        return small.double()

    monkeypatch.setattr(HeldOut, "build_model", build_model)
    message = run("second", "train.training.init_from=first", expected=2)
    assert 'Missing key(s) in state_dict: "head.weight", "head.bias"' in message
    assert 'Unexpected key(s) in state_dict: "3.bias", "3.weight"' in message
    assert "size mismatch for 0.weight" in message
    assert not Path("second").exists()
