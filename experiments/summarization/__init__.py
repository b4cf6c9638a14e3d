"""Summarisation with T5 and mT5."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``EXPERIMENT``, loaded when it is asked for: a task that tokenises needs no torch."""
    if name != "EXPERIMENT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from experiments.summarization.figures import sections
    from experiments.summarization.pipeline import VERSION, stages
    from experiments.summarization.presets import PRESETS
    from experiments.summarization.settings import SummarizationSettings
    from raypipe.pipeline.experiment import Experiment

    return Experiment("summarization", VERSION, SummarizationSettings, stages, sections, PRESETS)
