"""Models that one worker draws and the others receive."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from example_tasks import Regression, job
from torch import nn
from torch.multiprocessing.spawn import spawn

from raypipe.training import replica
from raypipe.training.oom import expandable_segments
from raypipe.training.parallel import Worker


class Drawn(Regression):
    """With weights of several kinds of initialization, of which some need the numbers at once."""

    def __init__(self, kind: str = "weights") -> None:
        super().__init__(dtype=torch.float32)
        self.kind = kind

    def build_model(self) -> nn.Module:
        first, last = nn.Linear(5, 4), nn.Linear(4, 1)
        nn.init.normal_(first.weight, std=0.1)
        nn.init.xavier_normal_(last.weight)
        nn.init.zeros_(last.bias)
        model = nn.Sequential(first, nn.Tanh(), last)
        if self.kind == "buffer":
            model.register_buffer("angles", torch.rand(3))
        if self.kind == "copy":
            model.register_buffer("start", first.weight.detach().clone())
        if self.kind == "truncated":
            nn.init.trunc_normal_(first.weight)
        return model

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        return ()


KINDS = ("weights", "buffer", "copy", "truncated")


def _build(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=2)
    found = []
    for strategy in ("ddp", "fsdp"):
        for kind in KINDS:
            asked = job(Drawn(kind), folder, (8, 1, 16, 2), strategy=strategy)
            made = replica.build(asked, Worker(rank, torch.device("cpu"), 2), print).model
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
            expected = Drawn(KINDS[number % 4]).build_model().state_dict()
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], value) for name, value in expected.items())
            assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_unless_the_user_has_configured_the_allocator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(each, "")  # restored after the test
        monkeypatch.delenv(each)
    assert expandable_segments()[name] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert expandable_segments() == {}
