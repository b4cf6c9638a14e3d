"""Synthetic perplexity curves over the number of topics T, with the start of a study on each.

The log-perplexity is a trend plus an error. The trend falls by ``gain`` for each factor e of T up
to the best T, rises by ``rise`` for each factor beyond it, and has a cliff
``(T / edge) ** power``: each topic costs the bound a Dirichlet over all words, so that the
perplexity explodes. The error is normal. It is interpolated between independent ones that lie a
factor of T apart: a small factor makes that of T + 1 unrelated, as another random start of LDA
does, and a large one makes the curve itself bend. All draws are keyed by ``(seed, sample)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from raypipe import Settings, keyed_random

#: streams of the keyed draws, apart from those of the other losses
STREAM_CURVE, STREAM_POINTS, STREAM_NOISE, STREAM_START = range(30, 34)

#: largest factor by which the best T can lie below the range
_BELOW = 4


class CurveSettings(Settings):
    """Distribution of the perplexity curves: every range is even in the logarithm."""

    t_min: int = Field(2, ge=2)
    """Smallest number of topics."""
    t_max: tuple[PositiveInt, PositiveInt] = (200, 1000)
    """Range of the largest number of topics."""
    gain: tuple[float, float] = (0.02, 0.3)
    """Range of the slope below the best T, per unit of log T."""
    rise: tuple[float, float] = (0.02, 0.4)
    """Range of the slope above the best T, per unit of log T."""
    edge: tuple[float, float] = (0.05, 2.0)
    """Range of the position of the cliff, as a fraction of `t_max`."""
    power: tuple[float, float] = (0.6, 2.2)
    """Range of the power of T with which the cliff rises."""
    noise: tuple[float, float] = (0.003, 0.04)
    """Range of the standard deviation of the log-perplexity."""
    spacing: tuple[float, float] = (1.01, 1.5)
    """Range of the factor between values of T with independent errors, even in the logarithm of the
    factor - 1; the errors between them are interpolated.
    """
    start: tuple[int, int] = (2, 20)
    """Range of the number of values of T that are known at the start."""

    @model_validator(mode="after")
    def _ordered(self) -> CurveSettings:
        for name in ("t_max", "gain", "rise", "edge", "power", "noise", "spacing", "start"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} = [{low}, {high}]: must be positive and ascending")
        if self.spacing[0] <= 1:
            raise ValueError(f"spacing = {self.spacing}: must be above 1")
        if self.t_min >= self.t_max[0]:
            raise ValueError(f"t_max = {self.t_max} must lie above t_min = {self.t_min}")
        if self.start[0] < 2:
            raise ValueError(f"start = {self.start}: a duel needs two values of T")
        return self


@dataclass(frozen=True)
class Curves:
    """B curves, each at the S values of T that a study starts from and N candidates."""

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
    """Return the expected log-perplexity ``[...]`` at T, up to a constant."""
    d = torch.log(T / best)
    return gain * F.relu(-d) + rise * F.relu(d) + (T / edge) ** power


def sample_curves(
    seed: int,
    samples: Tensor,
    n: int,
    settings: CurveSettings,
    dtype: torch.dtype = torch.float32,
) -> Curves:
    """Return curve ``samples[b]`` at ``n`` values of T, for all of ``samples``, an int64 [B].

    All small T are present; larger ones are random and even over log T. The value at a T does not
    depend on the other T. The result is on the device of ``samples``. All arithmetic is in double
    precision, which autocast leaves alone.
    """
    s, double = settings, torch.float64
    draws = keyed_random.uniform(seed, STREAM_CURVE, samples, 8, double).unbind(1)
    t_max = torch.floor(_log_uniform(draws[0], s.t_max))
    ranges = (s.gain, s.rise, s.edge, s.power, s.noise)
    gain, rise, edge, power, noise = (
        _log_uniform(u, bounds)[:, None] for u, bounds in zip(draws[2:7], ranges, strict=True)
    )
    spacing = 1 + _log_uniform(draws[7], (s.spacing[0] - 1, s.spacing[1] - 1))[:, None]
    edge = edge * t_max[:, None]
    # even in the logarithm, from below the range (then its lower end is best) up to the cliff
    lowest = s.t_min / _BELOW
    best = lowest * torch.exp(draws[1][:, None] * F.relu(torch.log(edge / lowest)))
    start, started = _start(seed, samples, s, t_max)
    T = torch.cat((start, _spread(seed, samples, n, s.t_min, t_max)), 1)
    trend = trend_of(T.to(double), best, gain, rise, edge, power)
    loss = trend + noise * _errors(seed, samples, T.to(double) / s.t_min, spacing, s)
    points = 2 * torch.log(T.to(double) / s.t_min) / torch.log(t_max / s.t_min)[:, None] - 1
    return Curves(T, points.to(dtype), trend.to(dtype), loss.to(dtype), started)


def _log_uniform(uniform: Tensor, bounds: tuple[float, float]) -> Tensor:
    low, high = bounds
    return low * torch.exp(uniform * math.log(high / low))


def _errors(
    seed: int, samples: Tensor, ratio: Tensor, spacing: Tensor, settings: CurveSettings
) -> Tensor:
    """Return the errors ``[B, S + N]`` at ``ratio`` = T / t_min, of variance 1.

    They are interpolated linearly over log T between independent ones, a factor ``spacing``
    ``[B, 1]`` apart.
    """
    knots = 2 + int(math.log(settings.t_max[1] / settings.t_min) / math.log(settings.spacing[0]))
    draws = keyed_random.normal(seed, STREAM_NOISE, samples, knots, torch.float64)
    place = torch.log(ratio) / torch.log(spacing)
    below = place.long()
    right = place - below
    mixed = (1 - right) * draws.gather(1, below) + right * draws.gather(1, below + 1)
    return mixed / torch.hypot(1 - right, right)


def _spread(seed: int, samples: Tensor, n: int, t_min: int, t_max: Tensor) -> Tensor:
    """Return distinct ascending integers ``[B, n]`` of [t_min, t_max], one per n-th of log T.

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
    """Return the T of the start and their mask: int64, bool ``[B, S]``.

    They are even in T, even in log T, or even in log T of a random part of the range.
    """
    (fewest, most), t_min = settings.start, settings.t_min
    u = keyed_random.uniform(seed, STREAM_START, samples, most + 4, torch.float64)
    count = fewest + torch.floor(u[:, 0] * (most + 1 - fewest))
    kind, places = u[:, 1:2], u[:, 4:]
    low, high = u[:, 2:4].sort(1).values.split(1, 1)
    places = torch.where(kind < 2 / 3, places, low + places * (high - low))
    end = (t_max + 1)[:, None]
    even = t_min + places * (end - t_min)
    even_in_log = t_min * torch.exp(places * torch.log(end / t_min))
    start = torch.floor(torch.where(kind < 1 / 3, even, even_in_log)).long()
    return start, torch.arange(most, device=samples.device) < count[:, None]
