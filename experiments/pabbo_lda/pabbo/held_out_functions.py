"""Held-out functions: the synthetic functions that PABBO is evaluated on and never trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from experiments.pabbo_lda.pabbo.duels import Candidates, draw_pairs
from experiments.pabbo_lda.pabbo.synthetic_functions import (
    SyntheticFunctionSettings,
    bowl,
    sample_functions,
)
from raypipe.config.settings import Settings
from raypipe.training import keyed_random

#: number of the first held-out sample, beyond the samples of any training
HELD_OUT = 2**62
_STREAM_PAIRS, _STREAM_STARTS = 20, 21
#: a start is far if both ends of its duel are farther from the optimum, a quarter of the range
FAR = 0.5


class EvaluationSettings(Settings):
    """Evaluation of PABBO on held-out functions."""

    functions: PositiveInt = 100
    """Number of held-out functions."""
    starts: PositiveInt = 2
    """Searches per function, each from its own random duel."""
    steps: PositiveInt = 30
    """Duels per search after the first one."""
    query_points: PositiveInt = 256
    """Points per function."""
    candidate_pairs: PositiveInt = 1024
    """Pairs of the points that a search can query as duels, per function."""
    sampled: bool = False
    """Whether to draw duels from the policy instead of the best score."""
    seed: int = Field(0, ge=0)
    """Seed of the held-out functions."""
    preferential_gp: bool = False
    """Whether to compare with a preferential Gaussian process, which takes about a second per
    search; needs BoTorch, the extra `duels`.
    """

    @model_validator(mode="after")
    def _fit_together(self) -> EvaluationSettings:
        check_pairs(self, "candidate_pairs", "query_points")
        if self.steps > self.candidate_pairs:
            raise ValueError(f"steps={self.steps} exceeds candidate_pairs={self.candidate_pairs}")
        return self


def check_pairs(settings: Settings, pairs: str, points: str) -> None:
    """Raise ValueError if the number of pairs exceeds the pairs of the points, both by key."""
    count, n = getattr(settings, pairs), getattr(settings, points)
    if count > n * (n - 1) // 2:
        raise ValueError(f"{pairs} is {count}, but {points}={n} form fewer pairs")


@dataclass(frozen=True)
class HeldOut:
    """B functions to optimize, with R starting duels each.

    They may be a part of all functions: ``first`` is the number of the first one, ``total`` the
    number of all.
    """

    candidates: Candidates
    best_utility: Tensor
    """[B]"""
    best_point: Tensor
    """[B]"""
    duels: Tensor
    """[B, R, 1, 2]"""
    utility: Tensor
    """[B, R, 1, 2]"""
    first: int
    total: int

    @property
    def far(self) -> Tensor:
        """Whether a start is far from the optimum, bool ``[B, R]``."""
        gap = (self.duels[:, :, 0] - self.best_point[:, None, None]).abs()
        return gap.amin(2) > FAR

    @property
    def spread(self) -> Tensor:
        """Range ``[B]`` of each function: the best utility minus the lowest of the candidates."""
        return self.best_utility - self.candidates.utility.amin((1, 2))

    def samples(self, step: int) -> Tensor:
        """Return the sample numbers ``[B * R]`` of a step's draws, the same for any parts."""
        functions, starts = self.duels.shape[:2]
        first = step * self.total * starts + self.first * starts
        return HELD_OUT + first + torch.arange(functions * starts, device=self.duels.device)


def held_out_functions(
    settings: EvaluationSettings,
    functions: SyntheticFunctionSettings,
    device: torch.device | str = "cpu",
    part: range | None = None,
) -> HeldOut:
    """Return functions of the training distribution whose samples no training draws.

    ``part`` are the numbers of the functions, by default all.
    """
    s = settings
    part = range(s.functions) if part is None else part
    samples = HELD_OUT + torch.arange(part.start, part.stop, device=device)
    drawn = sample_functions(s.seed, samples, s.query_points, functions)
    pairs = draw_pairs(s.seed, _STREAM_PAIRS, samples, s.query_points, s.candidate_pairs)
    candidates = Candidates.of(drawn.points, drawn.utility, pairs)
    first = keyed_random.uniform(s.seed, _STREAM_STARTS, samples, s.starts)
    index = (first * s.candidate_pairs).long()[..., None].expand(-1, -1, 2)
    return HeldOut(
        candidates,
        drawn.best_utility,
        drawn.best_point,
        candidates.duels.gather(1, index)[:, :, None],
        candidates.utility.gather(1, index)[:, :, None],
        part.start,
        s.functions,
    )


def published_functions(path: Path, settings: EvaluationSettings) -> HeldOut:
    """Return PABBO's published set of 1-D functions (``gp1d_tasks.npz``) with its starting duels.

    The candidates are random pairs of the 100 points stored with each function.
    """
    with np.load(path) as stored:
        arrays = {name: torch.from_numpy(stored[name]).float() for name in (
            "train_X", "train_y", "x_opt", "y_opt", "f_offset", "initial_pairs", "initial_pairs_y",
        )}  # fmt: skip
    points = arrays["train_X"]
    utility = bowl(arrays["train_y"], points, arrays["x_opt"], arrays["f_offset"])
    samples = HELD_OUT + torch.arange(len(points))
    n = points.shape[1]
    count = min(settings.candidate_pairs, n * (n - 1) // 2)
    pairs = draw_pairs(settings.seed, _STREAM_PAIRS, samples, n, count)
    return HeldOut(
        Candidates.of(points, utility, pairs),
        arrays["y_opt"],
        arrays["x_opt"],
        arrays["initial_pairs"].transpose(0, 1)[:, :, None],
        arrays["initial_pairs_y"].transpose(0, 1)[:, :, None],
        0,
        len(points),
    )
