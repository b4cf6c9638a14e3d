"""Synthetic functions on [-1, 1] with a known optimum, drawn from Gaussian processes.

A draw ``g`` of a Gaussian process conditioned on ``g(x_opt) = 0`` becomes the utility
``-(|g(x)| + (x - x_opt)**2 / 8 + offset)``, whose maximum is ``-offset`` at ``x_opt`` (PABBO, Zhang
et al., ICLR 2025, appendix on synthetic data). All draws are keyed by ``(seed, sample)``, and all
functions of a batch are drawn together.

The only feedback of a function are duels: pairs of its points, and the preferred point of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from raypipe import Settings, keyed_random

#: streams of the keyed draws, see :mod:`raypipe.training.keyed_random`
STREAM_SHAPE, STREAM_POINTS, STREAM_VALUES = 0, 1, 2

#: k(r) = (1 + p1 r + p2 r^2) exp(-(e1 r + e2 r^2)), r = distance / length scale;
#: rows: RBF, Matern 1/2, Matern 3/2, Matern 5/2; columns: p1, p2, e1, e2
KERNELS = (
    (0.0, 0.0, 0.0, 0.5),
    (0.0, 0.0, 1.0, 0.0),
    (math.sqrt(3), 0.0, math.sqrt(3), 0.0),
    (math.sqrt(5), 5 / 3, math.sqrt(5), 0.0),
)
_JITTER = 1e-6  # of the unit variance; the factorization is in double precision
_BOWL = 1 / 8
_LOG_LENGTH_MEAN, _LOG_LENGTH_STD = math.log(1 / 3), 0.75
_OFFSET = 5.0


class SyntheticFunctionSettings(Settings):
    """Distribution of the synthetic functions."""

    length_scale: tuple[float, float] = (0.05, 2.0)
    """Range of the length scale, log-normal within it."""
    std: tuple[float, float] = (0.1, 2.0)
    """Range of the standard deviation."""
    sharp_probability: float = Field(0.1, ge=0, le=1)
    """Probability of a sharp optimum."""


@dataclass(frozen=True)
class SyntheticFunctions:
    """A batch of B functions at N points each."""

    points: Tensor
    """[B, N] in [-1, 1]"""
    utility: Tensor
    """[B, N], larger is better"""
    best_point: Tensor
    """[B]"""
    best_utility: Tensor
    """[B]"""


def covariance(kernel: Tensor, distance: Tensor) -> Tensor:
    """Return the unit-variance covariance ``[B, ...]`` of kernels ``[B]`` (rows of ``KERNELS``).

    ``distance`` is ``[B, ...]`` in length scales.
    """
    table = torch.tensor(KERNELS, dtype=distance.dtype, device=distance.device)
    shape = (-1,) + (1,) * (distance.dim() - 1)
    p1, p2, e1, e2 = (column.view(shape) for column in table[kernel].unbind(1))
    polynomial = 1 + distance * (p1 + distance * p2)
    return polynomial * torch.exp(-distance * (e1 + distance * e2))


def bowl(gp: Tensor, points: Tensor, best_point: Tensor, offset: Tensor) -> Tensor:
    """Return the utility ``[B, N]`` of GP values ``[B, N]``; its maximum is ``-offset``."""
    distance = points - best_point[:, None]
    return -(gp.abs() + _BOWL * distance.square() + offset[:, None])


def sample_functions(
    seed: int,
    samples: Tensor,
    n: int,
    settings: SyntheticFunctionSettings,
    *,
    with_best: bool = False,
    dtype: torch.dtype = torch.float32,
) -> SyntheticFunctions:
    """Return function ``samples[b]`` at uniform points, for all of ``samples``, an int64 [B].

    ``with_best`` replaces the last point by the optimum. The result is on the device of
    ``samples``. All arithmetic is in double precision, which autocast leaves alone.
    """
    double = torch.float64
    kind, length, std, mean, sharp, best, offset = keyed_random.uniform(
        seed, STREAM_SHAPE, samples, 7, double
    ).unbind(1)
    kernel = (kind * len(KERNELS)).long()
    length = _log_normal(length, settings.length_scale)
    std = settings.std[0] + std * (settings.std[1] - settings.std[0])
    # the mean is the largest of ceil(2 / length) half-normal draws, one per stretch of the domain
    draws = torch.ceil(2 / length)
    mean = std * math.sqrt(2) * torch.erfinv(mean.pow(1 / draws))
    mean = mean + math.e * (sharp < settings.sharp_probability)
    best = 2 * best - 1
    offset = _OFFSET * (2 * offset - 1)

    points = 2 * keyed_random.uniform(seed, STREAM_POINTS, samples, n, double) - 1
    if with_best:
        points = torch.cat((points[:, :-1], best[:, None]), dim=1)
    # a joint draw at the points and the optimum, then conditioned by Matheron's rule (Wilson et
    # al., ICML 2020, eq. 9): g(x) - k(x, x_opt) / k(x_opt, x_opt) g(x_opt) vanishes at x_opt
    at = torch.cat((points, best[:, None]), dim=1) / length[:, None]
    unit = covariance(kernel, (at[:, :, None] - at[:, None, :]).abs())
    jitter = _JITTER * torch.eye(n + 1, dtype=double, device=samples.device)
    factor = torch.linalg.cholesky(unit + jitter)
    noise = keyed_random.normal(seed, STREAM_VALUES, samples, n + 1, double)
    prior = mean[:, None] + std[:, None] * (factor @ noise[:, :, None]).squeeze(2)
    gp = prior[:, :-1] - unit[:, :-1, -1] * prior[:, -1:]
    if with_best:
        gp = torch.cat((gp[:, :-1], torch.zeros_like(gp[:, :1])), dim=1)
    utility = bowl(gp, points, best, offset)
    return SyntheticFunctions(
        points.to(dtype), utility.to(dtype), best.to(dtype), (-offset).to(dtype)
    )


def _log_normal(uniform: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Return log-normal draws within the bounds, by the inverse distribution function."""
    low, high = (
        torch.special.ndtr((torch.log(uniform.new_tensor(b)) - _LOG_LENGTH_MEAN) / _LOG_LENGTH_STD)
        for b in bounds
    )
    normal = torch.special.ndtri(low + uniform * (high - low))
    return torch.exp(_LOG_LENGTH_MEAN + _LOG_LENGTH_STD * normal)


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
