"""Perplexity curves over the number of topics T, with the start of a study on each.

The logarithm of a perplexity is a trend and an error. The trend falls by ``gain`` for each factor e
of T up to the best T, rises by ``rise`` for each beyond it, and besides leaves the ground as
``(T / edge) ** power``: each topic costs the bound a Dirichlet over all words, so that the
perplexity itself explodes. The error is normal and of its own for every T: a value is
deterministic, but that of T + 1 is another. All draws are keyed by ``(seed, sample)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from raypipe.config.settings import Settings
from raypipe.training import keyed_random

#: streams of the keyed draws, apart from those of the other losses
STREAM_CURVE, STREAM_POINTS, STREAM_NOISE, STREAM_START = range(30, 34)

#: how far below the range, as a factor, the best T may lie
_BELOW = 4


class CurveSettings(Settings):
    """The distribution of curves; all of it is even in the logarithm, the minimum as well."""

    t_min: int = Field(2, ge=2, description="fewest topics")
    t_max: tuple[PositiveInt, PositiveInt] = Field((200, 1000), description="most topics")
    gain: tuple[float, float] = Field((0.03, 0.2), description="left of the best T, by log T")
    rise: tuple[float, float] = Field((0.03, 0.2), description="right of it, by log T")
    edge: tuple[float, float] = Field((0.05, 0.5), description="of the cliff, as a part of t_max")
    power: tuple[float, float] = Field((1.2, 2.0), description="of T that the cliff rises with")
    noise: tuple[float, float] = Field((0.005, 0.03), description="std of the log-perplexity")
    start: tuple[int, int] = Field((2, 20), description="values of T known at the start")

    @model_validator(mode="after")
    def _ordered(self) -> CurveSettings:
        for name in ("t_max", "gain", "rise", "edge", "power", "noise", "start"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} = [{low}, {high}]: must be positive and ascending")
        if self.t_min >= self.t_max[0]:
            raise ValueError(f"t_max = {self.t_max} must lie above t_min = {self.t_min}")
        if self.start[0] < 2:
            raise ValueError(f"start = {self.start}: a duel needs two values of T")
        return self


@dataclass(frozen=True)
class Curves:
    """B curves, each at S values of T that a study starts from and N that it may ask for."""

    T: Tensor
    """int64 [B, S + N]: the start in the order evaluated, then the others, ascending"""
    points: Tensor
    """[B, S + N] positions in [-1, 1] on log T of the curve's own range"""
    trend: Tensor
    """[B, S + N] expected log-perplexity, up to a constant of the curve"""
    loss: Tensor
    """[B, S + N] log-perplexity: the trend and the error"""
    started: Tensor
    """bool [B, S]: a shorter start has only the first of the S"""


def trend_of(
    T: Tensor, best: Tensor, gain: Tensor, rise: Tensor, edge: Tensor, power: Tensor
) -> Tensor:
    """The expected log-perplexity ``[...]`` at T, up to a constant."""
    d = torch.log(T / best)
    return gain * F.relu(-d) + rise * F.relu(d) + (T / edge) ** power


def sample_curves(
    seed: int,
    samples: Tensor,
    n: int,
    settings: CurveSettings,
    dtype: torch.dtype = torch.float32,
) -> Curves:
    """Curve ``samples[b]`` at ``n`` values of T, for all of ``samples``, an int64 [B].

    The small T are all there; the larger ones are spread evenly over log T at random. The value of
    a T does not depend on which others are drawn. The result is on the device of ``samples``.
    """
    with torch.autocast(samples.device.type, enabled=False):
        return _sample(seed, samples, n, settings, dtype)


def _sample(
    seed: int, samples: Tensor, n: int, settings: CurveSettings, dtype: torch.dtype
) -> Curves:
    s, double = settings, torch.float64
    draws = keyed_random.uniform(seed, STREAM_CURVE, samples, 7, double).unbind(1)
    t_max = torch.floor(_log_uniform(draws[0], s.t_max))
    gain, rise, edge, power, noise = (
        _log_uniform(u, bounds)[:, None]
        for u, bounds in zip(draws[2:], (s.gain, s.rise, s.edge, s.power, s.noise), strict=True)
    )
    edge = edge * t_max[:, None]
    # even in the logarithm up to the cliff, from below the range on: then its lower end is best
    lowest = s.t_min / _BELOW
    best = lowest * torch.exp(draws[1][:, None] * F.relu(torch.log(edge / lowest)))
    start, started = _start(seed, samples, s, t_max)
    T = torch.cat((start, _spread(seed, samples, n, s.t_min, t_max)), 1)
    trend = trend_of(T.to(double), best, gain, rise, edge, power)
    error = keyed_random.normal(seed, STREAM_NOISE, samples, s.t_max[1] + 1, double)
    loss = trend + noise * error.gather(1, T)
    points = 2 * torch.log(T.to(double) / s.t_min) / torch.log(t_max / s.t_min)[:, None] - 1
    return Curves(T, points.to(dtype), trend.to(dtype), loss.to(dtype), started)


def _log_uniform(uniform: Tensor, bounds: tuple[float, float]) -> Tensor:
    low, high = bounds
    return low * torch.exp(uniform * math.log(high / low))


def _spread(seed: int, samples: Tensor, n: int, t_min: int, t_max: Tensor) -> Tensor:
    """Distinct ascending integers ``[B, n]`` of [t_min, t_max], one in each n-th of log T.

    Where several n-ths share an integer, they take the next ones above it.
    """
    place = torch.arange(n, device=samples.device)
    within = keyed_random.uniform(seed, STREAM_POINTS, samples, n, torch.float64)
    span = torch.log((t_max + 1) / t_min)[:, None]
    T = torch.floor(t_min * torch.exp((place + within) / n * span)).long()
    T = T.minimum(t_max[:, None].long())
    T = place + (T - place).cummax(1).values
    # the last ones cannot pass the end
    return T.minimum(t_max[:, None].long() - (n - 1 - place))


def _start(
    seed: int, samples: Tensor, settings: CurveSettings, t_max: Tensor
) -> tuple[Tensor, Tensor]:
    """The T that studies start from, drawn evenly in T or in log T: int64 and bool ``[B, S]``."""
    (fewest, most), t_min = settings.start, settings.t_min
    u = keyed_random.uniform(seed, STREAM_START, samples, most + 2, torch.float64)
    count = fewest + torch.floor(u[:, 0] * (most + 1 - fewest))
    end = (t_max + 1)[:, None]
    even = t_min + u[:, 2:] * (end - t_min)
    even_in_log = t_min * torch.exp(u[:, 2:] * torch.log(end / t_min))
    start = torch.floor(torch.where(u[:, 1:2] < 0.5, even, even_in_log)).long()
    return start, torch.arange(most, device=samples.device) < count[:, None]
