"""Prior of the surrogate: random functions of one to three variables, in [-1, 1] each.

A function is a sum of up to three terms, then a monotone map of its values, noise and rounding:

- a Gaussian process with a Matern or squared exponential kernel, from random Fourier features
  (Rahimi and Recht 2007);
- a trend per variable, which falls to a point by a power and rises behind it by the same power, as
  validation errors do with the regularization;
- a cliff, which grows exponentially along a variable, as where a training diverges.

The parameters of all functions are drawn from ``(seed, sample)``, and a function has a value at
every point.

A search starts from points in the whole space or in a part of it, and goes on near its best point
so far. Where it goes depends only on observed values; a choice among all values would tell the
network what it has to predict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.pabbo_lda.surrogate.model import DIMENSIONS, ValueScale
from raypipe import keyed_random

#: streams of the keyed draws, apart from those of PABBO
STREAM_FUNCTION, STREAM_FEATURES, STREAM_NOISE = range(40, 43)
STREAM_PLACE, STREAM_STEP, STREAM_START, STREAM_SIZE = range(43, 47)

#: Fourier features of a Gaussian process
FEATURES = 64
#: degrees of freedom of the frequencies: Matern 3/2, Matern 5/2, squared exponential
_FREEDOM = (3, 5)
#: values of a cliff and of an exponential map grow up to this exponent
_STEEPEST = 230.0
#: times at which a search moves to its best point so far
_ROUNDS = 2
#: distance of steps near the best point
_NEAR = (0.015, 0.8)
#: probability that a coordinate lies at an end of its range
_END = 0.06


class _Draws:
    """Uniform draws of each function, taken in order."""

    def __init__(self, seed: int, samples: Tensor, n: int) -> None:
        self._uniform = keyed_random.uniform(seed, STREAM_FUNCTION, samples, n)
        self._taken = 0

    def uniform(self, low: float = 0.0, high: float = 1.0, n: int = 1) -> Tensor:
        """Return draws ``[B, n]`` in (low, high)."""
        self._taken += n
        return low + (high - low) * self._uniform[:, self._taken - n : self._taken]

    def log_uniform(self, low: float, high: float, n: int = 1) -> Tensor:
        """Return draws ``[B, n]`` that are even in the logarithm."""
        return self.uniform(math.log(low), math.log(high), n).exp()

    def chance(self, probability: float, n: int = 1) -> Tensor:
        """Return whether an event of this probability occurs, bool ``[B, n]``."""
        return self.uniform(n=n) < probability


@dataclass(frozen=True)
class PriorFunctions:
    """B functions of at most three variables."""

    used: Tensor
    """[B, 3] 1 for the variables that a function has, else 0; the first ones"""
    warp: tuple[Tensor, Tensor]
    """[B, 3] exponents of the monotone map of each variable"""
    frequencies: Tensor
    """[B, 3, F] of the Gaussian process"""
    phases: Tensor
    """[B, F]"""
    amplitudes: Tensor
    """[B, F]; the process has the variance 1"""
    weights: Tensor
    """[B, 3] of the process, the trends and the cliff"""
    center: Tensor
    """[B, 3] where a trend turns, also outside [-1, 1]"""
    slopes: tuple[Tensor, Tensor]
    """[B, 3] of a trend below and above its center"""
    power: Tensor
    """[B, 3] of a trend"""
    widest: Tensor
    """bool [B, 1]: the trends are joined by their maximum, not by their sum"""
    cliff: tuple[Tensor, Tensor, Tensor]
    """[B, 3] direction (0 but for one variable), [B, 1] edge, [B, 1] rate"""
    shape: Tensor
    """int64 [B, 1]: map of the values: none, exponential, cut, saturating"""
    strength: Tensor
    """[B, 1] of this map"""
    noise: Tensor
    """[B, 1] standard deviation of the noise, before the map"""
    rounding: Tensor
    """[B, 1] unit to which values are rounded, relative to the size of a value; 0 for none"""

    def __call__(self, points: Tensor, error: Tensor) -> Tensor:
        """Return observed values ``[B, N]``, in double precision.

        Args:
            points: ``[B, N, 3]``
            error: ``[B, N]`` standard normal draws.

        """
        u = ((points + 1) / 2).clamp(1e-6, 1 - 1e-6)
        first, second = (exponent[:, None] for exponent in self.warp)
        z = 2 * (1 - (1 - u**first) ** second) - 1
        waves = torch.cos(z @ self.frequencies + self.phases[:, None])
        process = (waves @ self.amplitudes[:, :, None])[..., 0]
        left, right = (slope[:, None] for slope in self.slopes)
        gap = z - self.center[:, None]
        trends = (
            torch.where(gap < 0, left, right) * gap.abs().clamp(min=1e-6) ** self.power[:, None]
        )
        trends = trends * self.used[:, None]
        trend = torch.where(self.widest, trends.amax(2), trends.sum(2))
        direction, edge, rate = self.cliff
        cliff = (rate * ((z @ direction[:, :, None])[..., 0] - edge)).clamp(max=_STEEPEST / 4).exp()
        process_weight, trend_weight, cliff_weight = self.weights.split(1, dim=1)
        value = process_weight * process + trend_weight * trend + cliff_weight * cliff
        return self._mapped((value + self.noise * error).double())

    def _mapped(self, value: Tensor) -> Tensor:
        strength = self.strength.double()
        exponential = (strength * value).clamp(max=_STEEPEST).exp()
        cut = torch.minimum(value, 2 * (1 - strength))
        saturating = (2 * strength * (value - 1 + strength)).sigmoid()
        every = torch.stack((value, exponential, cut, saturating), -1)
        mapped = every.gather(-1, self.shape[..., None].expand(*value.shape, 1))[..., 0]
        unit = self.rounding.double() * torch.where(self.shape == 1, strength, 1.0)
        return torch.where(unit > 0, (mapped / unit.clamp(min=1e-9)).round() * unit, mapped)


def sample_functions(seed: int, samples: Tensor) -> PriorFunctions:
    """Return the functions ``samples``, an int64 ``[B]``."""
    draw = _Draws(seed, samples, 64)
    kind = draw.uniform()
    count = 1 + (kind > 0.5).long() + (kind > 0.8).long()  # variables: half of the functions have 1
    used = (torch.arange(DIMENSIONS, device=samples.device) < count).float()

    lengths = draw.log_uniform(0.08, 2.5) * draw.log_uniform(0.5, 2, DIMENSIONS)
    irrelevant = draw.chance(0.3, DIMENSIONS) & (count > 1)
    lengths = torch.where(irrelevant, 10 * lengths, lengths)
    relevance = used * torch.where(irrelevant, 0.1, 1.0)
    frequencies, phases, amplitudes = _process(seed, samples, draw, lengths)

    warped = draw.chance(0.35)
    warp = [
        torch.where(warped, draw.log_uniform(0.4, 2.5, DIMENSIONS), 1.0).clamp(0.4, 2.5)
        for _ in range(2)
    ]

    explodes = draw.chance(0.15)
    weights = _weights(draw, explodes)
    steep = draw.log_uniform(0.2, 4)
    slopes = [
        relevance
        * torch.where(draw.chance(0.12, DIMENSIONS), 0.0, steep)
        * draw.log_uniform(0.3, 3, DIMENSIONS)
        for _ in range(2)
    ]
    power = torch.where(draw.chance(0.5, DIMENSIONS), 1.0, draw.log_uniform(0.6, 3, DIMENSIONS))
    axis = F.one_hot((draw.uniform() * count).long()[:, 0], DIMENSIONS).float()
    direction = axis * torch.where(draw.chance(0.75), 1.0, -1.0)
    # the best point of a function that explodes is often at the other end
    center = draw.uniform(-2, 2, DIMENSIONS)
    opposite = -direction * draw.uniform(-0.5, 2.5)
    center = torch.where(explodes & (axis > 0), opposite, center)

    shape = (draw.uniform()[..., None] > torch.tensor([0.5, 0.8, 0.9])).sum(-1)
    shape = torch.where(explodes, 1, shape)
    strength = torch.where(explodes, draw.log_uniform(0.05, 0.5), draw.log_uniform(0.03, 1))
    noise = draw.log_uniform(0.003, 0.25) * draw.chance(0.75)
    rounding = draw.log_uniform(0.005, 0.08) * draw.chance(0.1)
    return PriorFunctions(
        used,
        (warp[0], warp[1]),
        frequencies * used[:, :, None],
        phases,
        amplitudes,
        weights,
        center,
        (slopes[0], slopes[1]),
        power,
        draw.chance(0.25),
        (direction, draw.uniform(-0.6, 1.2), draw.log_uniform(3, 12)),
        shape,
        strength,
        noise,
        rounding,
    )


def _weights(draw: _Draws, explodes: Tensor) -> Tensor:
    """Return the weights ``[B, 3]`` of the process, the trends and the cliff.

    Functions that explode, bool ``[B, 1]``, have trends and a high cliff.
    """
    kind = draw.uniform()
    alone, smooth = (kind < 0.35) & ~explodes, (kind > 0.6) | explodes
    process = torch.where(alone, 1.0, draw.log_uniform(0.1, 1))  # the rest has both
    process = torch.where(smooth, draw.log_uniform(0.01, 0.3) * draw.chance(0.6), process)
    trend = torch.where(alone, 0.0, 1.0)
    cliff = draw.log_uniform(0.01, 1) * draw.chance(0.5) * (alone | smooth | draw.chance(0.5))
    cliff = torch.where(alone & draw.chance(0.7), 0.0, cliff)
    cliff = torch.where(explodes, draw.log_uniform(0.1, 1), cliff)
    return torch.cat((process, trend, cliff), 1)


def _process(
    seed: int, samples: Tensor, draw: _Draws, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return frequencies ``[B, 3, F]``, phases and amplitudes ``[B, F]`` of Gaussian processes."""
    most = max(_FREEDOM)
    rows = DIMENSIONS + most + 1
    normal = keyed_random.normal(seed, STREAM_FEATURES, samples, (rows + 1) * FEATURES)
    normal = normal.view(len(samples), rows + 1, FEATURES)
    squares = normal[:, DIMENSIONS : DIMENSIONS + most].square().cumsum(1)
    rough = torch.stack(
        [squares[:, nu - 1] / nu for nu in _FREEDOM] + [torch.ones_like(squares[:, 0])], 1
    )
    kernel = (draw.uniform() * rough.shape[1]).long()[..., None].expand(-1, -1, FEATURES)
    spread = rough.gather(1, kernel).rsqrt()
    frequencies = normal[:, :DIMENSIONS] * spread / lengths[..., None]
    amplitudes = normal[:, -2] * math.sqrt(2 / FEATURES)
    return frequencies, math.pi * normal[:, -1] * 4, amplitudes


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
