from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.store.run_directory import RunDirectory
from raypipe.training.checkpoint import (
    Checkpoint,
    CheckpointPart,
    CheckpointStore,
    Joined,
    _Hashing,
)


def checkpoint(step: int) -> Checkpoint:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return Checkpoint(step, model.state_dict(), optimizer.state_dict(), {"scale": 2.0**step})


def same(one: Checkpoint | None, other: Checkpoint) -> bool:
    return (
        one is not None
        and one.step == other.step
        and one.model.keys() == other.model.keys()
        and all(torch.equal(one.model[key], other.model[key]) for key in one.model)
        and str(one.optimizer) == str(other.optimizer)
        and one.scaler == other.scaler
    )


@pytest.fixture(params=["local", "remote"])
def store(request: pytest.FixtureRequest) -> CheckpointStore:
    run: RunDirectory = request.getfixturevalue("run" if request.param == "local" else "remote")
    return CheckpointStore(run, "sweep/0")


@pytest.fixture
def local(run: RunDirectory) -> CheckpointStore:
    return CheckpointStore(run, "sweep/0")


def folder(store: CheckpointStore, step: int) -> Path:
    return Path(store.run.checkpoints("sweep/0"), f"step_{step:08d}")


def names(store: CheckpointStore) -> list[str]:
    return store.run.list(store.run.checkpoints("sweep/0"))


def test_a_checkpoint_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    assert store.newest() is None
    odd = {
        "half": torch.tensor([1.1, -0.0, torch.inf, torch.nan], dtype=torch.bfloat16),
        "transposed": torch.arange(6.0, dtype=torch.float64).view(2, 3).T,
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
    }
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "m": torch.randn(5)}}, "x": [1, None]}
    store.save(Checkpoint(5, odd, optimizer, {}))
    found = store.newest()
    assert found is not None
    assert found.step == 5
    for name, tensor in odd.items():
        assert found.model[name].dtype == tensor.dtype
        torch.testing.assert_close(found.model[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert str(found.optimizer) == str(optimizer)


def test_weights_that_share_memory(store: CheckpointStore) -> None:
    embed, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    store.save(Checkpoint(1, model.state_dict(), {}, {}))
    found = store.newest()
    assert found is not None
    assert torch.equal(found.model["head.weight"], embed.weight)


def test_the_newest_few_are_kept(store: CheckpointStore) -> None:
    for step in (1, 2, 9, 10, 100):
        store.save(checkpoint(step))
    assert names(store) == ["step_00000010", "step_00000100"]
    assert same(store.newest(), checkpoint(100))


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.pt", "scaler.pt", "manifest.json"]
)
def test_a_damaged_one_is_passed_over_with_a_warning(
    local: CheckpointStore, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    local.save(checkpoint(1))
    local.save(checkpoint(2))
    path = folder(local, 2) / file
    content = path.read_bytes()
    flipped = content[: len(content) // 2] + b"\x01" + content[len(content) // 2 + 1 :]
    for damage in (content[:-1], content[: len(content) // 2], b"", flipped, None):
        path.unlink() if damage is None else path.write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            assert same(local.newest(), checkpoint(1))
        assert "step_00000002" in caplog.text
        caplog.clear()
        path.write_bytes(content)
    assert same(local.newest(), checkpoint(2))
    assert caplog.text == ""


def test_an_altered_manifest_is_never_believed(local: CheckpointStore) -> None:
    local.save(checkpoint(1))
    local.save(checkpoint(2))
    path = folder(local, 2) / "manifest.json"
    content = path.read_bytes()
    for other in (b"null", b"[]", b"5", b'{"step": 2}', b'{"step": 2, "sha256": []}',
                  b'{"step": 2, "sha256": {}}', b'{"step": "2", "sha256": {}}'):  # fmt: skip
        path.write_bytes(other)
        assert same(local.newest(), checkpoint(1))
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found = local.newest()
        assert same(found, checkpoint(1)) or same(found, checkpoint(2))


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

    def count(real: Any, *arguments: Any, **options: Any) -> Any:
        if next(calls) == after:
            raise _Killed
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        for kind, name in _REAL:
            patch.setattr(kind, name, partialmethod(_through, count, (kind, name)))
        with suppress(_Killed):
            local.save(checkpoint(step))
    found = local.newest()
    assert found is not None
    assert found.step in (step - 1, step)
    assert same(found, checkpoint(found.step))
    local.save(checkpoint(3))
    assert same(local.newest(), checkpoint(3))


_REAL = {
    (kind, name): getattr(kind, name)
    for kind, name in [(RunDirectory, "writing"), (RunDirectory, "delete"), (_Hashing, "write")]
}


def _through(owner: Any, count: Any, key: Any, *arguments: Any, **options: Any) -> Any:
    return count(_REAL[key], owner, *arguments, **options)


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_later_ones_do_not_push_out_whole_ones(run: RunDirectory, keep: int) -> None:
    store = CheckpointStore(run, "sweep/0", keep=3)
    for step in (10, 20, 30):
        store.save(checkpoint(step))
    for step in (20, 30):
        (folder(store, step) / "model.safetensors").write_bytes(b"")
    store = CheckpointStore(run, "sweep/0", keep=keep)
    assert same(store.newest(), checkpoint(10))
    store.save(checkpoint(15))  # the run resumed at 10 and saves more often
    assert same(store.newest(), checkpoint(15))
    assert "step_00000030" not in names(store)


def parts(number: int, step: int) -> list[Checkpoint]:
    """The rows of a weight and of its state, shared by workers; one rank has none."""
    rows = torch.arange(4.0 * step, 4.0 * step + 6).view(3, 2)
    found = []
    for rank, mine in enumerate([*rows.split([2, 1]), rows[3:]][:number]):
        state = {"exp_avg": 10 * mine, **({"step": torch.tensor(3.0)} if rank == 0 else {})}
        model = {"weight": mine, **({"mean": torch.ones(2)} if rank == 0 else {})}
        found.append(Checkpoint(step, model, {"state": {"weight": state}}, {}, f"trace {step}"))
    return found


def of_rank(rank: int, attempt: str = "0123abcd", *, is_ended: bool = False) -> CheckpointPart:
    return CheckpointPart(rank, 3, attempt, lambda: is_ended)


def test_the_parts_of_all_workers_are_one_checkpoint(store: CheckpointStore) -> None:
    first, *others = parts(3, step=5)
    with ThreadPoolExecutor(1) as threads:  # it waits for the others
        complete = threads.submit(store.save, first, of_rank(0))
        for rank, each in enumerate(others, start=1):
            assert store.newest() is None
            store.save(each, of_rank(rank))
        complete.result()
    found = store.newest()
    assert found is not None
    assert (found.step, found.trace) == (5, "trace 5")
    weight, state = found.model["weight"], found.optimizer["state"]["weight"]
    assert isinstance(weight, Joined)
    assert torch.equal(weight.whole(), torch.arange(20.0, 26.0).view(3, 2))
    assert torch.equal(state["exp_avg"].whole(), 10 * weight.whole())
    assert torch.equal(found.model["mean"], torch.ones(2))
    assert state["step"] == 3


def test_a_checkpoint_without_the_part_of_a_lost_worker_is_passed_over(
    local: CheckpointStore,
) -> None:
    local.save(checkpoint(1))
    first, second, _ = parts(3, step=2)
    local.save(second, of_rank(1))
    with pytest.raises(RuntimeError, match="the part 0123abcd-00002 of another worker is missing"):
        local.save(first, of_rank(0, is_ended=True))
    assert same(local.newest(), checkpoint(1))
    # the next attempt writes parts of its own
    for rank, part in reversed([*enumerate(parts(3, step=2))]):
        local.save(part, of_rank(rank, "ffff0000"))
    found = local.newest()
    assert found is not None
    assert found.step == 2


def test_a_worker_that_is_ahead_keeps_its_part(local: CheckpointStore) -> None:
    store = CheckpointStore(local.run, local.trial_id, keep=1)
    for step in (1, 2):
        for rank, part in reversed([*enumerate(parts(3, step))]):
            if (step, rank) == (1, 0):
                store.save(parts(3, step=2)[2], of_rank(2))
            store.save(part, of_rank(rank))
    found = store.newest()
    assert found is not None
    assert found.step == 2
    assert names(store) == ["step_00000002"]


def test_the_manifest_is_written_last(
    local: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    real = RunDirectory.writing

    def note(run: RunDirectory, path: str, **options: Any) -> Any:
        written.append(Path(path).name)
        return real(run, path, **options)

    monkeypatch.setattr(RunDirectory, "writing", note)
    local.save(checkpoint(1))
    assert sorted(written[:-1]) == ["model.safetensors", "optimizer.pt", "scaler.pt"]
    assert written[-1] == "manifest.json"
    manifest = json.loads((folder(local, 1) / "manifest.json").read_text())
    assert set(manifest["sha256"]) == set(written[:-1])
