"""The optimizer of the settings: AdamW, Adam, Adafactor, or Muon for the matrices of the blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from raypipe.training.adafactor import Adafactor
from raypipe.training.muon import Groups, MuonWithAdamW
from raypipe.training.optimizer_settings import OptimizerSettings


def build(
    model: nn.Module, blocks: Iterable[nn.Module], training: OptimizerSettings
) -> torch.optim.Optimizer:
    """Return the optimizer of ``training.optimizer`` for the parameters of a model.

    Args:
        model: the model on its device, maybe sharded.
        blocks: its repeated blocks, whose matrices Muon updates.
        training: the settings.

    Raises:
        ValueError: Muon has no matrices to update.

    """
    parameters = list(model.parameters())
    if training.optimizer == "adafactor":
        return Adafactor(_groups(parameters, training))
    if training.optimizer == "adam":
        return torch.optim.Adam(_groups(parameters, training), betas=training.betas, fused=True)
    if training.optimizer == "adamw":
        return torch.optim.AdamW(_groups(parameters, training), betas=training.betas, fused=True)
    hidden = _matrices(blocks)
    if not hidden:
        raise ValueError(
            "training.optimizer = muon: this task names no blocks with matrices "
            "(TrainTask.blocks); name them, or use adamw"
        )
    chosen = set(hidden)
    others = [parameter for parameter in parameters if parameter not in chosen]
    return MuonWithAdamW(_groups(hidden, training), _groups(others, training), training.betas)


def _matrices(blocks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the matrices of blocks, each once, without embeddings."""
    modules = [module for block in blocks for module in block.modules()]
    looked_up = {p for m in modules if isinstance(m, nn.Embedding) for p in m.parameters()}
    found = dict.fromkeys(p for m in modules for p in m.parameters(recurse=False) if p.ndim == 2)
    return [parameter for parameter in found if parameter not in looked_up]


def _groups(parameters: Sequence[Tensor], training: OptimizerSettings) -> Groups:
    """Return the parameters that decay and those that do not, each with its options."""
    decayed, others = list(parameters), []
    if training.weight_decay_on == "matrices":
        decayed = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim <= 1]
    parts = ((decayed, training.weight_decay), (others, 0.0))
    rate = training.learning_rate
    return [{"params": p, "lr": rate, "weight_decay": decay} for p, decay in parts if p]
