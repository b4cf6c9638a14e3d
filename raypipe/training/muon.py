"""Muon for plain and for sharded matrices, together with AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from raypipe.training import parallel

#: groups of parameters, each with its options
Groups = list[dict[str, Any]]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some weights and AdamW for the others, as one optimizer.

    Muon orthogonalizes the momentum of a matrix (Jordan et al. 2024). Its rate is scaled so that
    updates are as large as AdamW's (Liu et al. 2025, Muon is scalable for LLM training, section
    2.2), which makes one learning rate serve both.

    Args:
        matrices: groups of matrices for Muon, each with its options.
        others: groups of all other weights for AdamW.
        betas: the decay rates of AdamW's moments.

    """

    def __init__(self, matrices: Groups, others: Groups, betas: tuple[float, float]) -> None:
        muon = Muon(matrices, adjust_lr_fn="match_rms_adamw")
        rest = [torch.optim.AdamW(others, betas=betas, fused=True)] if others else []
        self._parts: Sequence[torch.optim.Optimizer] = [muon, *rest]
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take an optimizer step; ``closure`` is ignored."""
        del closure
        groups = iter(self.param_groups)
        for part in self._parts:  # loading a state replaces the groups and the state
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
            part.step()


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` for plain matrices, and for those whose rows are sharded, as by FSDP.

    Momentum and weights are updated where they are. Each worker orthogonalizes some of the sharded
    matrices: it receives their updates from all workers, and returns to each the rows that it
    holds. These two exchanges are in the arithmetic of the products.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take an optimizer step; ``closure`` is ignored."""
        del closure
        pairs = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for matrix, group in pairs:
            if not isinstance(matrix, DTensor):
                direction = orthogonalized(self._update(matrix, group), group)
                _take(matrix, matrix, direction, group)
        sharded = [pair for pair in pairs if isinstance(pair[0], DTensor)]
        if not sharded:
            return None
        matrices, groups = zip(*sharded, strict=True)
        updates = list(map(self._update, matrices, groups))
        directions = _exchanged_directions(matrices, updates, groups)
        for each in zip(matrices, parallel.local(matrices), directions, groups, strict=True):
            _take(*each)
        return None

    def _update(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Return this worker's rows of the update to orthogonalize, in the type of the products."""
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer, gradient = parallel.local([state["momentum_buffer"], cast("Tensor", matrix.grad)])
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.to(product_type(update.device))


def product_type(device: torch.device) -> torch.dtype:
    """Return the type of the products on a device.

    A CPU without instructions for bf16 takes 30 times as long in it as in fp32.
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return a matrix with the singular vectors of ``update`` and singular values near 1.

    These are the Newton-Schulz iterations of ``torch.optim.Muon``, in the type of ``update``.
    """
    a, b, c = group["ns_coefficients"]
    wide = update.T if update.shape[0] > update.shape[1] else update
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if update.shape[0] > update.shape[1] else wide


def _take(whole: Tensor, weight: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    """Step in a direction with this worker's rows ``weight`` of a matrix."""
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(direction, alpha=-group["lr"] * 0.2 * sqrt(max(whole.shape)))


def _exchanged_directions(
    matrices: Sequence[DTensor], updates: Sequence[Tensor], groups: Sequence[dict[str, Any]]
) -> list[Tensor]:
    """Return this worker's rows of each orthogonalized update."""
    mesh = matrices[0].device_mesh
    workers, rank, group = range(mesh.size()), mesh.get_local_rank(), mesh.get_group()
    shares = _divided(matrices, len(workers))
    empty = updates[0].new_empty(0)
    owned, rows = shares[rank], list(map(parallel.shard_rows, matrices))
    received = _exchanged(
        [[updates[i] for i in part] for part in shares],
        [[(rows[i][each], matrices[i].shape[1]) for i in owned] for each in workers],
        group,
        empty,
    )
    directions = [
        orthogonalized(torch.cat(parts), groups[i]).split(rows[i])
        for i, parts in zip(owned, zip(*received, strict=True), strict=True)
    ]
    returned = _exchanged(
        [[parts[each] for parts in directions] for each in workers],
        [[updates[i].shape for i in part] for part in shares],
        group,
        empty,
    )
    found = {
        i: direction
        for part, directions in zip(shares, returned, strict=True)
        for i, direction in zip(part, directions, strict=True)
    }
    return [found[i] for i in range(len(matrices))]


def _divided(matrices: Sequence[Tensor], workers: int) -> list[list[int]]:
    """Return the matrices that each worker orthogonalizes, with about the same work for all."""

    def work(number: int) -> int:
        short, long = sorted(matrices[number].shape)
        return short * short * long

    parts: list[list[int]] = [[] for _ in range(workers)]
    sums = [0] * workers
    for number in sorted(range(len(matrices)), key=work, reverse=True):
        idlest = sums.index(min(sums))
        parts[idlest].append(number)
        sums[idlest] += work(number)
    return parts


def _exchanged(
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    group: dist.ProcessGroup,
    empty: Tensor,
) -> list[list[Tensor]]:
    """Send ``parts[r]`` to each worker ``r``; return what comes from each, in these shapes.

    ``empty`` is an empty tensor of their kind.
    """
    sent = torch.cat([empty, *(matrix.flatten() for part in parts for matrix in part)])
    sizes = [list(map(prod, each)) for each in shapes]
    received = sent.new_empty(sum(map(sum, sizes)))
    given = [sum(matrix.numel() for matrix in part) for part in parts]
    dist.all_to_all_single(received, sent, list(map(sum, sizes)), given, group=group)
    flat = iter(received.split([size for each in sizes for size in each]))
    return [[next(flat).view(shape) for shape in each] for each in shapes]
