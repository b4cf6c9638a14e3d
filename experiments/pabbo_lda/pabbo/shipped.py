"""Trained models of PABBO that ship with raypipe; ``docs/pabbo.md`` has their model card."""

from __future__ import annotations

import json
from importlib import resources

from experiments.pabbo_lda.pabbo.model import PabboModelSettings
from raypipe.errors import ConfigError
from raypipe.training.weights import metadata_of


def shipped_weights(stage: str) -> bytes:
    """Return the safetensors file of the model that ships for a stage, such as train_small."""
    return resources.files(__package__).joinpath("weights", f"{stage}.safetensors").read_bytes()


def checked_weights(stage: str, model: PabboModelSettings) -> bytes:
    """Return the shipped weights of a stage.

    Raises:
        ConfigError: the shipped model has another size than ``model``.

    """
    weights = shipped_weights(stage)
    shipped = PabboModelSettings.model_validate_json(metadata_of(weights)["model"])
    if shipped != model:
        sizes = ", ".join(f"{key}: {value}" for key, value in shipped.model_dump().items())
        raise ConfigError(
            f"{stage}.weights = shipped: the shipped model has another size than "
            f"{stage}.pabbo.model; set it to {{{sizes}}}, or leave {stage}.weights out"
        )
    return weights


def trained_on(weights: bytes) -> dict[str, object]:
    """Return the distribution of functions or curves that a model was trained on, by key."""
    distribution: dict[str, object] = json.loads(metadata_of(weights)["trained_on"])
    return distribution
