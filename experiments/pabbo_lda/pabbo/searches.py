"""Searches on held-out functions: by trained models and by the methods they are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.common.evaluation import task_device
from experiments.pabbo_lda.pabbo.evaluation import regrets, simple_regret
from experiments.pabbo_lda.pabbo.held_out_functions import EvaluationSettings, held_out_functions
from experiments.pabbo_lda.pabbo.preferential_gp import preferential_gp_scorer
from experiments.pabbo_lda.pabbo.synthetic_functions import FunctionSettings


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
        methods = parts[0].regret
        return cls(
            {name: torch.cat([part.regret[name] for part in parts]) for name in methods},
            torch.cat([part.far for part in parts]),
            torch.cat([part.spread for part in parts]),
        )


def search(
    models: Mapping[str, bytes],
    settings: EvaluationSettings,
    functions: FunctionSettings,
    part: range,
) -> Searches:
    """Return the searches of :func:`regrets`, and those of a preferential Gaussian process.

    Args:
        models: the models' safetensors files, by method.
        settings: the held-out functions, and whether the process takes part. It takes the pair
            with the best score, also where the model's duels are drawn.
        functions: their distribution.
        part: the numbers of the B functions among them.

    """
    regret = dict(regrets(models, settings, functions, part))
    held_out = held_out_functions(settings, functions, task_device(), part)
    if settings.preferential_gp:
        best = settings.model_copy(update={"sampled": False})
        found = simple_regret(preferential_gp_scorer(), held_out, best)
        regret["preferential_gp"] = found.cpu()
    return Searches(regret, held_out.far.cpu(), held_out.spread.cpu())
