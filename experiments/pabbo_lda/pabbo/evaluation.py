"""Searches on held-out functions: of trained models, random search and other scorers of duels.

All functions and starts advance together: one step is one forward pass. Functions are the
independent units of all statistics: a function's value is the mean over its starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from experiments.common.evaluation import task_device
from experiments.pabbo_lda.pabbo.functions import (
    Candidates,
    SyntheticFunctionSettings,
    draw_pairs,
    sample_functions,
    winners,
)
from experiments.pabbo_lda.pabbo.model import PabboModel, restore_model
from raypipe import Settings, keyed_random, stats

#: number of the first held-out sample, beyond the samples of any training
HELD_OUT = 2**62
#: streams of the keyed draws
_STREAM_PAIRS, _STREAM_STARTS, _STREAM_RANDOM = range(20, 23)
#: a start is far if both ends of its duel are farther from the optimum, a quarter of the range
FAR = 0.5
#: largest regret, as a share of a function's range, that counts as close
TOLERANCES = {"1_percent": 0.01, "5_percent": 0.05}
#: starts of a search: all, and those whose first duel is near to or far from the optimum
STARTS = ("all", "near", "far")

#: (duels [B, R, C, 2], preferred [B, R, C], candidates, t/T) to scores [B, R, P]
Scorer = Callable[[Tensor, Tensor, Candidates, float], Tensor]


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
    """B functions to optimize, with R starting duels each."""

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
    """Number of the first one among all held-out functions"""
    total: int
    """Number of all held-out functions"""

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
        """Return the sample numbers ``[B * R]`` of a step's draws, the same in any parts."""
        functions, starts = self.duels.shape[:2]
        first = (step * self.total + self.first) * starts
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


@torch.no_grad()
def simple_regret(score: Scorer, held_out: HeldOut, settings: EvaluationSettings) -> Tensor:
    """Return the regret ``[B, R, steps + 1]`` of the best point so far, the starting duel first.

    Each step queries the new duel with the best score.
    """
    candidates = held_out.candidates
    functions, pairs = candidates.preferred.shape
    duels, preferred = held_out.duels, winners(held_out.utility)
    asked = torch.zeros(functions, duels.shape[1], pairs, dtype=torch.bool, device=duels.device)
    best = [held_out.utility.amax((2, 3))]
    for step in range(settings.steps):
        scores = score(duels, preferred, candidates, (step + 1) / settings.steps)
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
        pairs = candidates.preferred.shape[1]
        samples = held_out.samples(duels.shape[2])
        draws = keyed_random.uniform(seed, _STREAM_RANDOM, samples, pairs)
        return draws.view(*duels.shape[:2], pairs)

    return score


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


@dataclass(frozen=True)
class Searches:
    """Searches on B functions from R starts each."""

    regret: Mapping[str, Tensor]
    """[B, R, steps + 1] of each method"""
    far: Tensor
    """[B, R] whether a start is far from the optimum"""
    spread: Tensor
    """[B] range of each function"""

    @classmethod
    def of(cls, parts: Sequence[Searches]) -> Searches:
        """Return the searches of all parts of the functions."""
        return cls(
            {name: torch.cat([part.regret[name] for part in parts]) for name in parts[0].regret},
            torch.cat([part.far for part in parts]),
            torch.cat([part.spread for part in parts]),
        )

    def started(self, start: str) -> Tensor:
        """Return which searches ``[B, R]`` have a start of a kind of ``STARTS``."""
        return {"all": torch.ones_like(self.far), "far": self.far, "near": ~self.far}[start]


def search(
    models: Mapping[str, bytes],
    settings: EvaluationSettings,
    functions: SyntheticFunctionSettings,
    part: range | None = None,
) -> Searches:
    """Return the searches of trained models, and of the methods that they are compared with.

    These are random search and, if the settings say so, a preferential Gaussian process.

    Args:
        models: the models' safetensors files, by method.
        settings: the held-out functions.
        functions: their distribution.
        part: the numbers of the B functions among them, by default all.

    """
    device = task_device()
    held_out = held_out_functions(settings, functions, device, part)
    scorers = {
        **{name: policy_scorer(restore_model(each).to(device)) for name, each in models.items()},
        "random": random_scorer(settings.seed, held_out),
    }
    regret = {name: simple_regret(each, held_out, settings) for name, each in scorers.items()}
    if settings.preferential_gp:
        from experiments.pabbo_lda.pabbo.preferential_gp import preferential_gp_scorer

        regret["preferential_gp"] = simple_regret(preferential_gp_scorer(), held_out, settings)
    regret = {name: values.cpu() for name, values in regret.items()}
    return Searches(regret, held_out.far.cpu(), held_out.spread.cpu())


def regret_rows(regret: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return the mean of the regrets ``[B, R, steps + 1]`` of each method, a row per step.

    The 95 % confidence band is normal: 1.96 standard errors of the functions' means.
    """
    rows: list[dict[str, Any]] = []
    for method, values in regret.items():
        means = values.mean(1).double().cpu().numpy()
        mean = means.mean(0)
        half = 1.96 * means.std(0, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else 0 * mean
        rows += [
            {
                "method": method,
                "step": step,
                "mean": float(m),
                "low": float(m - h),
                "high": float(m + h),
            }
            for step, (m, h) in enumerate(zip(mean, half, strict=True))
        ]
    return rows


def duels_to(regret: Tensor, spread: Tensor, tolerance: float) -> Tensor:
    """Return the duels ``[B, R]`` after the first one until the regret is a share of the range.

    Infinite where it never is.
    """
    far = regret > tolerance * spread[:, None, None]
    return far.sum(2).double().masked_fill(far[..., -1], torch.inf)


def by_function(searches: Searches, start: str) -> dict[str, pd.DataFrame]:
    """Return functions x methods of each measure; missing without a start of the kind.

    The measures are ``regret`` after the last duel, ``area`` (the mean regret after each duel,
    without the first one) and the ``duels_to_...`` a tolerance, of which one that is never reached
    counts as one more than the duels.
    """
    chosen = searches.started(start)
    count = chosen.sum(1)
    found: dict[str, dict[str, Any]] = {}
    for method, regret in searches.regret.items():
        regret = regret.double()
        measures = {"regret": regret[..., -1], "area": regret[..., 1:].mean(2)}
        for name, share in TOLERANCES.items():
            needed = duels_to(regret, searches.spread, share)
            measures[f"duels_to_{name}"] = needed.clamp_max(regret.shape[2])
        for name, value in measures.items():
            mean = (value.where(chosen, 0.0).sum(1) / count).masked_fill(count == 0, torch.nan)
            found.setdefault(name, {})[method] = mean.numpy()
    return {name: pd.DataFrame(columns) for name, columns in found.items()}


def measure_rows(searches: Searches, control: str) -> list[dict[str, Any]]:
    """Return a row per method and kind of start: means, 95 % intervals and paired tests.

    The tests compare each method with ``control`` over functions (Wilcoxon's signed-rank test,
    corrected by Holm for the number of methods).
    """
    rows = []
    for start in STARTS:
        chosen = searches.started(start)
        if not chosen.any():
            continue
        tables = by_function(searches, start)
        tests = {name: stats.paired_comparisons(table, control).set_index("first")["p_holm"]
                 for name, table in tables.items()}  # fmt: skip
        for method, regret in searches.regret.items():
            row: dict[str, Any] = {
                "start": start,
                "method": method,
                "functions": int(chosen.any(1).sum()),
                "searches": int(chosen.sum()),
            }
            for name in ("regret", "area"):
                values = tables[name][method].dropna()
                half = stats.half_width(values.std(ddof=1), len(values))
                row |= {
                    name: float(values.mean()),
                    f"{name}_half": stats.finite_or_none(half.item()),
                }
            for name, share in TOLERANCES.items():
                needed = duels_to(regret, searches.spread, share)[chosen]
                median = needed.quantile(0.5, interpolation="lower").item()
                row[f"reached_{name}"] = float(needed.isfinite().double().mean())
                row[f"duels_to_{name}"] = stats.finite_or_none(median)
            rows.append(row | {f"p_{name}": test.get(method) for name, test in tests.items()})
    return rows
