"""Duels: pairs of a function's points, and the preferred point of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raypipe.training import keyed_random


def draw_pairs(seed: int, stream: int, samples: Tensor, points: int, pairs: int) -> Tensor:
    """Return distinct random pairs of each sample's points: int64 ``[B, pairs, 2]``."""
    every = torch.triu_indices(points, points, offset=1, device=samples.device).T
    keys = keyed_random.words(seed, stream, samples, len(every))
    return every[keys.topk(pairs, dim=1, sorted=True).indices]


def pick(values: Tensor, pairs: Tensor) -> Tensor:
    """Return the values ``[B, N]`` at both ends of the pairs ``[B, P, 2]``: ``[B, P, 2]``."""
    return values.gather(1, pairs.flatten(1)).view_as(pairs)


def winners(utility: Tensor) -> Tensor:
    """Return 1 where the second of utilities ``[..., 2]`` is larger, else 0: int64 ``[...]``."""
    return (utility[..., 1] > utility[..., 0]).long()


@dataclass(frozen=True)
class Candidates:
    """The possible queries of B functions: P pairs of N points, with the answers."""

    points: Tensor
    """[B, N] in [-1, 1]"""
    pairs: Tensor
    """[B, P, 2], indices of points"""
    utility: Tensor
    """[B, P, 2] at the ends of the pairs"""
    duels: Tensor
    """[B, P, 2] points at the ends of the pairs"""
    preferred: Tensor
    """[B, P] 0 or 1"""

    @classmethod
    def of(cls, points: Tensor, utility: Tensor, pairs: Tensor) -> Candidates:
        """Return the candidates of points and utilities ``[B, N]`` and pairs ``[B, P, 2]``."""
        ends = pick(utility, pairs)
        return cls(points, pairs, ends, pick(points, pairs), winners(ends))


def summed(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of the metrics of each function ``[B]``, without gradient."""
    return {name: values.detach().sum() for name, values in metrics.items()}
