from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from example_tasks import Regression, job
from torch import nn

from raypipe.store.run_directory import RunDirectory
from raypipe.training.checkpoint import Checkpoint, CheckpointStore, _Hashing
from raypipe.training.job import schedule_trace
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase


def checkpoint(step: int) -> Checkpoint:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return Checkpoint(step, model.state_dict(), optimizer.state_dict(), {"scale": 2.0**step})


def assert_is(found: Checkpoint | None, step: int) -> None:
    """It is the checkpoint of a step, bit for bit."""
    torch.testing.assert_close(found and vars(found), vars(checkpoint(step)), rtol=0, atol=0)


@pytest.fixture
def local(run: RunDirectory) -> CheckpointStore:
    return CheckpointStore(run, "sweep/0")


def folder(store: CheckpointStore, step: int) -> Path:
    return Path(store.run.checkpoints("sweep/0"), f"step_{step:08d}")


def names(store: CheckpointStore) -> list[str]:
    return store.run.list(store.run.checkpoints("sweep/0"))


@pytest.mark.parametrize("order", [range(8), range(7, -1, -1)])
def test_trainings_share_a_trace_as_long_as_their_steps_are_equal(order: range) -> None:
    asked = job(Regression(), Path("unused"))
    phases = [[Phase("same", 3, 16, 0.1), Phase(name, 4, 16, 0.1)] for name in ("one", "other")]
    one, other = (schedule_trace(asked, given) for given in phases)
    assert {step for step in order if one(step) == other(step)} == {0, 1, 2, 3}


def test_the_newest_few_are_kept_bit_for_bit(anywhere: RunDirectory) -> None:
    store = CheckpointStore(anywhere, "sweep/0")
    assert store.newest() is None
    for step in (1, 2, 9, 10, 100):
        store.save(checkpoint(step))
    assert names(store) == ["step_00000010", "step_00000100"]
    assert_is(store.newest(), 100)


def test_damaged_later_ones_do_not_push_out_whole_ones(local: CheckpointStore) -> None:
    for step in (10, 20):
        local.save(checkpoint(step))
    (folder(local, 20) / "state.pt").write_bytes(b"")
    store = CheckpointStore(local.run, "sweep/0", keep=1)
    store.save(checkpoint(15))  # the run resumed at 10 and saves more often
    assert_is(store.newest(), 15)
    assert names(store) == ["step_00000015"]


@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
def test_a_damaged_one_is_passed_over_with_a_warning(local: CheckpointStore, file: str) -> None:
    local.save(checkpoint(1))
    local.save(checkpoint(2))
    path, said = folder(local, 2) / file, list[str]()
    content = path.read_bytes()
    others = [content[:at] + b"!" + content[at + 1 :] for at in range(len(content) // 2, 0, -99)]
    for damage in (content[:-1], content[: len(content) // 2], b"", *others, None):
        path.unlink() if damage is None else path.write_bytes(damage)
        assert_is(local.newest(said.append), 1)
        assert "step_00000002" in said.pop()
        path.write_bytes(content)
    assert_is(local.newest(said.append), 2)
    assert said == []


class _Killed(BaseException):
    """Stands for a SIGKILL."""


@pytest.mark.parametrize("step", [2, 3])  # 2: a step that is saved again
@pytest.mark.parametrize("after", [*range(12), 20, 30, 40, 50])
def test_a_kill_anywhere_in_saving_leaves_a_whole_one(
    local: CheckpointStore, after: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies after so many writes to files, and deletions."""
    for earlier in (1, 2):
        local.save(checkpoint(earlier))
    calls = iter(range(100))

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == after:
                raise _Killed
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch, suppress(_Killed):
        for kind, name in (
            (RunDirectory, "writing"),
            (RunDirectory, "delete"),
            (_Hashing, "write"),
        ):
            patch.setattr(kind, name, counted(getattr(kind, name)))
        local.save(checkpoint(step))
    found = local.newest()
    assert found is not None
    assert found.step in (step - 1, step)
    assert_is(found, found.step)
    local.save(checkpoint(3))
    assert_is(local.newest(), 3)


def test_a_checkpoint_that_cannot_be_written_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointStore, "save", Mock(side_effect=OSError(28, "No space left")))
    asked = job(Regression(), tmp_path)  # one checkpoint, at the end
    with pytest.raises(OSError, match="No space left"):
        train(asked, Worker(0, torch.device("cpu")))
    assert not asked.run_dir.exists(asked.run_dir.model("fit"))
