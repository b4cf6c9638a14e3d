"""Language-model pretraining: a decoder-only transformer that predicts the next token."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``EXPERIMENT``, loaded when it is asked for: a task that tokenises needs no torch."""
    if name != "EXPERIMENT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from experiments.lm_pretrain.pipeline import VERSION, stages
    from experiments.lm_pretrain.settings import PretrainingSettings
    from raypipe.pipeline.experiment import Experiment

    return Experiment("lm_pretrain", VERSION, PretrainingSettings, stages)
