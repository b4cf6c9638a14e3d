"""The task of docs/training.md, as a newcomer would run it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import start

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "training.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's two files."""
    folder = tmp_path_factory.mktemp("guide")
    text = GUIDE.read_text(encoding="utf-8")
    for name, language in (("digits.py", "python"), ("digits.yaml", "yaml")):
        found = re.search(rf"`{name}`.*?```{language}\n(.*?)```", text, re.DOTALL)
        assert found is not None
        (folder / name).write_text(found[1], encoding="utf-8")
    return folder


Run = Callable[..., RunDirectory]


@pytest.fixture(scope="module")
def run(folder: Path, address: str) -> Run:
    """The guide's command, on a cluster that was started before the guide's files were."""

    def run(name: str, *arguments: str, faults: str = "") -> RunDirectory:
        given = ("run", "digits.yaml", "--run-dir", name, "--address", address, *arguments)
        ended = start(folder, *given, environment={"RAYPIPE_FAULTS": faults})
        output, _ = ended.communicate()
        assert ended.returncode == 0, output
        return RunDirectory.at(folder / name)

    return run


def steps(run: RunDirectory) -> pd.DataFrame:
    table = read_table(run, "steps").set_index("step")
    assert not table.index.duplicated().any()
    return table


def test_the_task_is_short(folder: Path) -> None:
    assert len((folder / "digits.py").read_text().splitlines()) < 60


@pytest.fixture(scope="module")
def plain(run: Run) -> RunDirectory:
    """The run without a fault: one micro-batch of 16 a step, each step logged."""
    return run("plain", *SIXTEEN)


SIXTEEN = (
    "train.training.effective_batch=16",
    "train.training.micro_batch=16",
    "train.training.log_every=1",
    "train.training.checkpoint_every=25",
)


def test_it_learns(plain: RunDirectory) -> None:
    table = steps(plain)
    assert list(table.index) == list(range(1, 201))
    assert table["eval_accuracy"].dropna().iloc[-1] > 0.85
    trial = read_table(plain, "trials").iloc[0]
    assert (trial["status"], trial["steps"], trial["workers"]) == ("succeeded", 200, 1)
    assert trial["loader_wait_share"] < 1
    samples = read_table(plain, "gpu_samples")
    assert len(samples)
    assert samples["gpu_uuid"].isna().all()


@pytest.mark.slow
def test_out_of_memory_ends_with_a_quarter_of_the_micro_batch(
    run: Run, plain: RunDirectory
) -> None:
    found = run("oom", *SIXTEEN, faults="oom:micro_batch>4")
    trial = read_table(found, "trials").iloc[0]
    assert (trial["micro_batch"], trial["accumulation"], trial["attempts"]) == (4, 4, 3)
    assert list(read_table(found, "failures")["kind"]) == ["out_of_memory"] * 2
    both = steps(plain)["loss"], steps(found)["loss"]
    pd.testing.assert_series_equal(both[1].iloc[:40], both[0].iloc[:40], rtol=1e-4)


@pytest.mark.slow
def test_a_killed_worker_leaves_no_trace_in_the_losses(run: Run, plain: RunDirectory) -> None:
    found = run("killed", *SIXTEEN, faults="kill_worker:step=60")
    assert list(read_table(found, "failures")["kind"]) == ["worker_died"]
    pd.testing.assert_series_equal(steps(found)["loss"], steps(plain)["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_workers(run: Run, plain: RunDirectory, strategy: str) -> None:
    given = ("train.scaling.workers=2", f"train.scaling.strategy={strategy}")
    found = run(strategy, *SIXTEEN, "train.training.micro_batch=4", *given)
    trial = read_table(found, "trials").iloc[0]
    assert (trial["workers"], trial["accumulation"]) == (2, 2)
    both = steps(plain)["loss"], steps(found)["loss"]
    pd.testing.assert_series_equal(both[1].iloc[:40], both[0].iloc[:40], rtol=1e-4)
