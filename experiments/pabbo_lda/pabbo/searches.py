"""Searches on held-out functions: by trained models and by the methods they are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.common.evaluation import task_device
from experiments.pabbo_lda.pabbo.evaluation import policy_scorer, random_scorer, simple_regret
from experiments.pabbo_lda.pabbo.held_out_functions import EvaluationSettings, held_out_functions
from experiments.pabbo_lda.pabbo.model import restore_model
from experiments.pabbo_lda.pabbo.preferential_gp import preferential_gp_scorer
from experiments.pabbo_lda.pabbo.synthetic_functions import SyntheticFunctionSettings


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
    functions: SyntheticFunctionSettings,
    part: range,
) -> Searches:
    """Return the searches of trained models, and of the methods that they are compared with.

    These are random search and, if the settings say so, a preferential Gaussian process, which
    takes the pair with the best score, also where the models' duels are drawn.

    Args:
        models: the models' safetensors files, by method.
        settings: the held-out functions.
        functions: their distribution.
        part: the numbers of the B functions among them.

    """
    device = task_device()
    held_out = held_out_functions(settings, functions, device, part)
    scorers = {
        **{name: policy_scorer(restore_model(each).to(device)) for name, each in models.items()},
        "random": random_scorer(settings.seed, held_out),
    }
    regret = {name: simple_regret(each, held_out, settings) for name, each in scorers.items()}
    if settings.preferential_gp:
        best = settings.model_copy(update={"sampled": False})
        regret["preferential_gp"] = simple_regret(preferential_gp_scorer(), held_out, best)
    regret = {name: values.cpu() for name, values in regret.items()}
    return Searches(regret, held_out.far.cpu(), held_out.spread.cpu())
