"""Values that a training reads from a card, for fake cards, whose kernels compute nothing.

torch exchanges the sizes of Python objects as numbers on the cards.
"""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import torch
import torch.distributed as dist

from raypipe.training import history
from raypipe.training.parallel import HostCopy

_numbers = itertools.count()


def exchange_by_store() -> None:
    """Send Python objects through the store of the process group, which is on the host."""
    dist.broadcast_object_list = _broadcast
    dist.all_gather_object = _gather


def read_ones() -> None:
    """Let the sums of a logged step be 1, which no kernel computed."""
    history.HostCopy = _Ones  # type: ignore[misc]


class _Ones(HostCopy):
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
