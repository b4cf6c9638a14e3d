"""Models that one worker draws and the others receive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from example_tasks import Regression, job
from torch import nn
from torch.multiprocessing.spawn import spawn

from raypipe.training import replica
from raypipe.training.job import Worker
from raypipe.training.oom import expand_segments


class Drawn(Regression):
    """With weights of each kind of initialization; ``buffer`` adds a random one that is none."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__(dtype=torch.float32)
        self.buffer = buffer

    def build_model(self) -> nn.Module:
        model = super().build_model()
        first, last = model[0], model[-1]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        nn.init.trunc_normal_(first.weight)
        nn.init.xavier_normal_(last.weight)
        last.bias.data.fill_(torch.rand(()) if self.buffer else 0.5)
        model.register_buffer("angles", torch.rand(3) if self.buffer else torch.arange(3.0))
        return model


def _build(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2)
    found = []
    for strategy in ("ddp", "fsdp"):
        for buffer in (False, True):
            asked = job(Drawn(buffer=buffer), folder, (8, 1, 16, 2), strategy=strategy)
            made = replica.build(asked, Worker(rank, torch.device("cpu"), 2, 2), print).model
            state = {
                name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
                for name, value in made.state_dict().items()
            }
            found.append((state, torch.rand(1)))
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    os._exit(0)


def test_all_workers_have_the_weights_and_random_numbers_of_one(tmp_path: Path) -> None:
    spawn(_build, (tmp_path,), nprocs=2)
    for rank in (0, 1):
        for number, (state, after) in enumerate(torch.load(tmp_path / f"{rank}.pt")):
            torch.manual_seed(0)
            expected = Drawn(buffer=number % 2 == 1).build_model().state_dict()
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            assert torch.equal(after, torch.rand(1))


def test_weights_of_other_workers_are_not_drawn() -> None:
    before = torch.get_rng_state()
    with replica._Undrawn():
        Drawn().build_model()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_unless_the_user_has_configured_the_allocator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(each, "")  # restored after the test
        monkeypatch.delenv(each)
    expand_segments()
    assert os.environ[name] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:128")
    expand_segments()
    assert os.environ[name] == "max_split_size_mb:128"
