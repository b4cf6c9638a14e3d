"""Evaluated points and queries of the surrogate's training, as in the middle of a search.

A search starts from points in the whole space or in a part of it, and goes on near its best point
so far. Where it goes depends only on observed values; a choice among all values would tell the
network what it has to predict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.pabbo_lda.surrogate.model import DIMENSIONS, ValueScale
from experiments.pabbo_lda.surrogate_training.prior import (
    STREAM_NOISE,
    PriorFunctions,
    sample_functions,
)
from raypipe.training import keyed_random

#: streams of the keyed draws, apart from those of the functions
STREAM_PLACE, STREAM_STEP, STREAM_START, STREAM_SIZE = range(43, 47)

#: times at which a search moves to its best point so far
_ROUNDS = 2
#: distance of steps near the best point
_NEAR = (0.015, 0.8)
#: probability that a coordinate lies at an end of its range
_END = 0.06


@dataclass(frozen=True)
class SearchStates:
    """Evaluated points and queries of B functions, on the scale of the network."""

    known: Tensor
    """[B, n, 3]"""
    values: Tensor
    """[B, n]"""
    queries: Tensor
    """[B, m, 3]"""
    targets: Tensor
    """[B, m] observed values at the queries"""
    used: Tensor
    """[B, 3]"""


def sample_searches(seed: int, samples: Tensor, n: int, m: int) -> SearchStates:
    """Return searches on the functions ``samples``, an int64 ``[B]``, after n evaluations."""
    functions = sample_functions(seed, samples)
    used, total = functions.used, n + m
    error = keyed_random.normal(seed, STREAM_NOISE, samples, total)
    draws = keyed_random.uniform(seed, STREAM_PLACE, samples, total * (DIMENSIONS + 1))
    place = draws[:, : total * DIMENSIONS].view(-1, total, DIMENSIONS)
    low, high = math.log(_NEAR[0]), math.log(_NEAR[1])
    reach = (low + (high - low) * draws[:, total * DIMENSIONS :]).exp()
    step = keyed_random.normal(seed, STREAM_STEP, samples, total * DIMENSIONS)
    step = step.view(-1, total, DIMENSIONS) * reach[..., None]
    start = keyed_random.uniform(seed, STREAM_START, samples, 2 * DIMENSIONS + _ROUNDS + 2)
    center, width, rest = start.split((DIMENSIONS, DIMENSIONS, _ROUNDS + 2), dim=1)

    # the start is in a part of the space for half of the searches
    width = torch.where(rest[:, :1] < 0.5, 0.1 + 0.9 * width, 1.0)
    begin = center * (1 - width)
    everywhere = _with_ends(2 * place - 1, step, used)
    started = (2 * (begin[:, None] + place * width[:, None]) - 1) * used[:, None]
    order = torch.arange(n, device=samples.device)
    known = started[:, :n]
    ends = 1 + (rest[:, 2:].sort(1).values * n).long()
    ends = torch.where(rest[:, 1:2] < 0.3, n, ends)  # or only a start
    for end in ends.unbind(1):
        near = _near_best(functions, known, error[:, :n], order < end[:, None], step[:, :n], used)
        known = torch.where((order < end[:, None])[..., None], known, near)
    seen = functions(known, error[:, :n])

    half = m // 2
    everyone = torch.ones_like(seen, dtype=torch.bool)
    near = _near_best(functions, known, error[:, :n], everyone, step[:, n : n + half], used)
    queries = torch.cat((near, everywhere[:, n + half :]), 1)
    values = functions(queries, error[:, n:])
    scale = ValueScale(seen)
    return SearchStates(
        known, scale.forward(seen).float(), queries, scale.forward(values).float(), used
    )


def _near_best(
    functions: PriorFunctions,
    known: Tensor,
    error: Tensor,
    evaluated: Tensor,
    step: Tensor,
    used: Tensor,
) -> Tensor:
    """Return points ``[B, N, 3]`` at steps ``[B, N, 3]`` from the best evaluated ones."""
    values = functions(known, error).masked_fill(~evaluated, torch.inf)
    best = values.argmin(1)[:, None, None].expand(-1, 1, DIMENSIONS)
    return _with_ends(known.gather(1, best) + step, step, used)


def _with_ends(points: Tensor, noise: Tensor, used: Tensor) -> Tensor:
    """Return the points in [-1, 1], some coordinates at an end, and 0 in variables without use."""
    inside = 1 - ((points.clamp(-3, 3) + 1).abs() - 2).abs()  # reflected at the ends
    fraction = (noise * 1e4).frac().abs()
    inside = torch.where(fraction < _END, torch.where(fraction < _END / 2, -1.0, 1.0), inside)
    return inside * used[:, None]
