"""Simple regret on held-out functions, for the model, for random search, for any other scorer.

All functions and starts advance together: a step is one forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from experiments.pabbo_lda.duels import Candidates, draw_pairs, winners
from experiments.pabbo_lda.functions import FunctionSettings, bowl, sample_functions
from experiments.pabbo_lda.model import ModelSettings, PabboModel, restore_model
from raypipe.config.settings import Settings
from raypipe.training import keyed_random

#: held-out functions are numbered from here, beyond the ids of any training
HELD_OUT = 2**62
STREAM_PAIRS, STREAM_STARTS, STREAM_RANDOM, STREAM_SAMPLED = range(20, 24)

#: (duels [B, R, C, 2], preferred [B, R, C], candidates, t/T) to scores [B, R, P]
Scorer = Callable[[Tensor, Tensor, Candidates, float], Tensor]


class EvaluationSettings(Settings):
    """The held-out measure."""

    functions: PositiveInt = Field(100, description="held-out functions")
    starts: PositiveInt = Field(2, description="runs a function, each from a random duel")
    steps: PositiveInt = Field(30, description="duels after the first")
    query_points: PositiveInt = Field(256, description="points a function")
    candidate_pairs: PositiveInt = Field(1024, description="pairs of them that can be asked")
    sampled: bool = Field(False, description="draw from the policy instead of the best score")
    seed: int = Field(0, ge=0, description="of the held-out functions")

    @model_validator(mode="after")
    def _fit_together(self) -> EvaluationSettings:
        check_pairs(self, "candidate_pairs", "query_points")
        if self.steps > self.candidate_pairs:
            raise ValueError(f"steps={self.steps} exceeds candidate_pairs={self.candidate_pairs}")
        return self


def check_pairs(settings: Settings, pairs: str, points: str) -> None:
    """Raise ValueError where so many points, by the keys' names, do not form so many pairs."""
    count, n = getattr(settings, pairs), getattr(settings, points)
    if count > n * (n - 1) // 2:
        raise ValueError(f"{pairs} is {count}, but {points}={n} form fewer pairs")


@dataclass(frozen=True)
class HeldOut:
    """Functions to optimise, with R starting duels each."""

    candidates: Candidates
    best_utility: Tensor
    """[B]"""
    duels: Tensor
    """[B, R, 1, 2]"""
    utility: Tensor
    """[B, R, 1, 2]"""


def held_out_functions(
    settings: EvaluationSettings, functions: FunctionSettings, device: torch.device | str = "cpu"
) -> HeldOut:
    """Functions of the training distribution, drawn apart from any training."""
    s = settings
    samples = HELD_OUT + torch.arange(s.functions, device=device)
    drawn = sample_functions(s.seed, samples, s.query_points, functions)
    pairs = draw_pairs(s.seed, STREAM_PAIRS, samples, s.query_points, s.candidate_pairs)
    candidates = Candidates.of(drawn.points, drawn.utility, pairs)
    first = keyed_random.uniform(s.seed, STREAM_STARTS, samples, s.starts)
    index = (first * s.candidate_pairs).long()[..., None].expand(-1, -1, 2)
    return HeldOut(
        candidates,
        drawn.best_utility,
        candidates.duels.gather(1, index)[:, :, None],
        candidates.utility.gather(1, index)[:, :, None],
    )


def published_functions(path: Path, settings: EvaluationSettings) -> HeldOut:
    """PABBO's published set of 1-D functions (``gp1d_tasks.npz``) with its starting duels.

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
    pairs = draw_pairs(settings.seed, STREAM_PAIRS, samples, n, count)
    return HeldOut(
        Candidates.of(points, utility, pairs),
        arrays["y_opt"],
        arrays["initial_pairs"].transpose(0, 1)[:, :, None],
        arrays["initial_pairs_y"].transpose(0, 1)[:, :, None],
    )


def simple_regret(score: Scorer, held_out: HeldOut, settings: EvaluationSettings) -> Tensor:
    """The regret ``[B, R, steps + 1]`` of the best point so far, the starting duel first.

    Each step asks the duel with the best score that was not asked before, or, with ``sampled``,
    draws one from the softmax of the scores.
    """
    candidates = held_out.candidates
    functions, pairs = candidates.preferred.shape
    runs = held_out.duels.shape[1]
    device = candidates.points.device
    duels, preferred = held_out.duels, winners(held_out.utility)
    asked = torch.zeros(functions, runs, pairs, dtype=torch.bool, device=device)
    samples = HELD_OUT + torch.arange(functions * runs, device=device)
    best = [held_out.utility.amax((2, 3))]
    with torch.no_grad():
        for step in range(settings.steps):
            scores = score(duels, preferred, candidates, (step + 1) / settings.steps)
            if settings.sampled:
                noise = keyed_random.gumbel(
                    settings.seed, STREAM_SAMPLED, samples + step * len(samples), pairs
                )
                scores = scores + noise.view_as(scores)
            choice = scores.masked_fill(asked, -torch.inf).argmax(2, keepdim=True)
            asked = asked.scatter(2, choice, True)
            index = choice.expand(-1, -1, 2)
            duels = torch.cat((duels, candidates.duels.gather(1, index)[:, :, None]), 2)
            won = candidates.preferred.gather(1, choice[..., 0])[..., None]
            preferred = torch.cat((preferred, won), 2)
            reached = candidates.utility.gather(1, index).amax(2)
            best.append(torch.maximum(best[-1], reached))
    return held_out.best_utility[:, None, None] - torch.stack(best, 2)


def policy_scorer(model: PabboModel, batch_size: int | None = None) -> Scorer:
    """Scores by the model's acquisition head, ``batch_size`` functions a forward at most."""

    def score(duels: Tensor, preferred: Tensor, candidates: Candidates, used: float) -> Tensor:
        size = batch_size or len(duels)
        parts = []
        for start in range(0, len(duels), size):
            rows = slice(start, start + size)
            context = model.embed_duels(duels[rows], preferred[rows])
            encoded = model(context, model.embed_points(candidates.points[rows]))
            parts.append(model.score(encoded, candidates.pairs[rows], used))
        return torch.cat(parts)

    return score


def random_scorer(seed: int) -> Scorer:
    """Random search: independent uniform scores."""

    def score(duels: Tensor, preferred: Tensor, candidates: Candidates, used: float) -> Tensor:
        del preferred, used
        functions, runs, length, _ = duels.shape
        pairs = candidates.preferred.shape[1]
        # one sample number for each run at each length, so that steps differ
        sample = HELD_OUT + length * functions * runs
        samples = sample + torch.arange(functions * runs, device=duels.device)
        draws = keyed_random.uniform(seed, STREAM_RANDOM, samples, pairs)
        return draws.view(functions, runs, pairs)

    return score


@dataclass(frozen=True)
class RegretCurve:
    """Mean simple regret by step, with a 95 % confidence band over functions."""

    step: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


def regret_curve(regret: Tensor) -> RegretCurve:
    """The curve of regrets ``[B, R, T + 1]``; functions are the independent units.

    The band is normal: 1.96 standard errors of the functions' means over their starts.
    """
    means = regret.mean(1).double().cpu().numpy()
    mean = means.mean(0)
    half = 1.96 * means.std(0, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0 * mean
    return RegretCurve(np.arange(means.shape[1]), mean, mean - half, mean + half)


def evaluate_model(
    model: PabboModel,
    settings: EvaluationSettings,
    functions: FunctionSettings,
    device: torch.device | str,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Mean simple regret after the budget, over all steps, and of random search."""
    held_out = held_out_functions(settings, functions, device)
    ours = simple_regret(policy_scorer(model, batch_size), held_out, settings)
    random = simple_regret(random_scorer(settings.seed), held_out, settings)
    return {
        "simple_regret": float(ours[..., -1].mean()),
        "simple_regret_all_steps": float(ours.mean()),
        "random_simple_regret": float(random[..., -1].mean()),
        "random_simple_regret_all_steps": float(random.mean()),
    }


def measure(
    model: ModelSettings,
    weights: bytes,
    settings: EvaluationSettings,
    functions: FunctionSettings,
) -> list[dict[str, float | str]]:
    """The regret curves of a trained model and of random search, a row a method and step.

    Args:
        model: the size of the transformer.
        weights: its safetensors file.
        settings: the held-out functions.
        functions: their distribution.

    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held_out = held_out_functions(settings, functions, device)
    scorers = {
        "pabbo": policy_scorer(restore_model(model, weights).to(device)),
        "random": random_scorer(settings.seed),
    }
    rows: list[dict[str, float | str]] = []
    for method, scorer in scorers.items():
        curve = regret_curve(simple_regret(scorer, held_out, settings))
        for step, mean, low, high in zip(
            curve.step.tolist(),
            curve.mean.tolist(),
            curve.low.tolist(),
            curve.high.tolist(),
            strict=True,
        ):
            rows.append({"method": method, "step": step, "mean": mean, "low": low, "high": high})
    return rows
