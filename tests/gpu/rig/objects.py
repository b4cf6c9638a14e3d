"""Values that a training reads from a card, for fake cards, whose kernels compute nothing.

torch exchanges the sizes of Python objects as numbers on the cards.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raypipe.training import history
from raypipe.training.job import TrainingJob
from raypipe.training.parallel import HostCopy
from tests.raypipe.examples.example_tasks import Regression
from tests.raypipe.launch.test_train import job

_numbers = itertools.count()


class OnCards(Regression):
    """A training whose workers exchange and read nothing that a kernel computes."""

    def build_model(self) -> nn.Module:
        history.HostCopy = _Ones  # type: ignore[misc]
        if dist.is_initialized():
            exchange_by_store()
        return super().build_model()

    def evaluate(self, model: nn.Module, device: Any, batch_size: int) -> Mapping[str, float]:
        return {}


def job_of(task: Regression, *plan: int, gpus: float = 1.0) -> TrainingJob:
    """Return two steps of a training whose workers have so many GPUs each."""
    share = {"gpus_per_worker": gpus, "cpus_per_worker": 0.5}
    return replace(job(Path(mkdtemp()), *plan, steps=2, **share), task=task)


def exchange_by_store() -> None:
    """Send Python objects through the store of the process group, which is on the host."""
    dist.broadcast_object_list = _broadcast
    dist.all_gather_object = _gather


class _Ones(HostCopy):
    """Sums of a logged step that are 1."""

    def values(self) -> torch.Tensor:
        return torch.ones_like(super().values())


def _broadcast(values: list[Any], src: int = 0, **_: Any) -> None:
    values[:] = _exchanged(values, [src])[0]


def _gather(values: list[Any], value: Any) -> None:
    values[:] = _exchanged(value, range(len(values)))


def _exchanged(value: Any, ranks: Any) -> list[Any]:
    """Return the values of these ranks; every rank calls it in the same order."""
    store, number = dist.distributed_c10d._get_default_store(), next(_numbers)
    if dist.get_rank() in ranks:
        store.set(f"rig-{number}-{dist.get_rank()}", pickle.dumps(value))
    return [pickle.loads(store.get(f"rig-{number}-{rank}")) for rank in ranks]
