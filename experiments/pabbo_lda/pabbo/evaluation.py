"""Simple regret on held-out functions: of the model, of random search, of any other scorer.

All functions and starts advance together: one step is one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from experiments.pabbo_lda.pabbo.duels import Candidates, winners
from experiments.pabbo_lda.pabbo.held_out_functions import (
    EvaluationSettings,
    HeldOut,
    held_out_functions,
)
from experiments.pabbo_lda.pabbo.model import PabboModel
from experiments.pabbo_lda.pabbo.synthetic_functions import SyntheticFunctionSettings
from raypipe.training import keyed_random

#: streams of the keyed draws, after those of the held-out functions
_STREAM_RANDOM, _STREAM_SAMPLED = 22, 23

#: (duels [B, R, C, 2], preferred [B, R, C], candidates, t/T) to scores [B, R, P]
Scorer = Callable[[Tensor, Tensor, Candidates, float], Tensor]


def simple_regret(score: Scorer, held_out: HeldOut, settings: EvaluationSettings) -> Tensor:
    """Return the regret ``[B, R, steps + 1]`` of the best point so far, the starting duel first.

    Each step queries the new duel with the best score or, with ``sampled``, draws one from the
    softmax of the scores.
    """
    candidates = held_out.candidates
    functions, pairs = candidates.preferred.shape
    runs = held_out.duels.shape[1]
    device = candidates.points.device
    duels, preferred = held_out.duels, winners(held_out.utility)
    asked = torch.zeros(functions, runs, pairs, dtype=torch.bool, device=device)
    best = [held_out.utility.amax((2, 3))]
    with torch.no_grad():
        for step in range(settings.steps):
            scores = score(duels, preferred, candidates, (step + 1) / settings.steps)
            if settings.sampled:
                noise = keyed_random.gumbel(
                    settings.seed, _STREAM_SAMPLED, held_out.samples(step), pairs
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
    """Return scores by the model's acquisition head, ``batch_size`` functions per forward pass."""

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


def random_scorer(seed: int, held_out: HeldOut) -> Scorer:
    """Return random search as a scorer: independent uniform scores of each function and step."""

    def score(duels: Tensor, preferred: Tensor, candidates: Candidates, used: float) -> Tensor:
        del preferred, used
        functions, runs, length, _ = duels.shape
        pairs = candidates.preferred.shape[1]
        draws = keyed_random.uniform(seed, _STREAM_RANDOM, held_out.samples(length), pairs)
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
    """Return the curve of regrets ``[B, R, T + 1]``; functions are the independent units.

    The band is normal: 1.96 standard errors of the functions' means over their starts.
    """
    means = regret.mean(1).double().cpu().numpy()
    mean = means.mean(0)
    half = 1.96 * means.std(0, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0 * mean
    return RegretCurve(np.arange(means.shape[1]), mean, mean - half, mean + half)


def evaluate_model(
    model: PabboModel,
    settings: EvaluationSettings,
    functions: SyntheticFunctionSettings,
    device: torch.device | str,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Return the mean simple regret, at the end and over all steps, of model and random search."""
    held_out = held_out_functions(settings, functions, device)
    measures = {}
    for prefix, scorer in (
        ("", policy_scorer(model, batch_size)),
        ("random_", random_scorer(settings.seed, held_out)),
    ):
        regret = simple_regret(scorer, held_out, settings)
        measures[f"{prefix}simple_regret"] = float(regret[..., -1].mean())
        measures[f"{prefix}simple_regret_all_steps"] = float(regret.mean())
    return measures


def regret_rows(regret: Mapping[str, Tensor]) -> list[dict[str, float | str]]:
    """Return the curve of the regrets ``[B, R, steps + 1]`` of each method, a row per step."""
    rows: list[dict[str, float | str]] = []
    for method, values in regret.items():
        c = regret_curve(values)
        columns = (column.tolist() for column in (c.step, c.mean, c.low, c.high))
        rows += [
            {"method": method, "step": step, "mean": mean, "low": low, "high": high}
            for step, mean, low, high in zip(*columns, strict=True)
        ]
    return rows
