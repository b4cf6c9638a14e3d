"""The transformer trainer: a classifier or regressor of tables and of sequences."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``EXPERIMENT``, loaded when it is asked for: a task that prepares data needs no torch."""
    if name != "EXPERIMENT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from experiments.transformer.figures import figures
    from experiments.transformer.pipeline import VERSION, stages
    from experiments.transformer.settings import TrainerSettings
    from raypipe.pipeline.experiment import Experiment

    return Experiment("transformer", VERSION, TrainerSettings, stages, figures)
