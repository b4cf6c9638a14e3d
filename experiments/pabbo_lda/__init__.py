"""The main job: the optimiser that finds the number of topics with the fewest LDA trainings.

Trains the optimiser model PABBO (small and large), measures it on held-out functions, runs the
studies of every optimiser on every corpus, and compares them.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """``EXPERIMENT``, loaded when it is asked for: the worker of an LDA training needs no torch."""
    if name != "EXPERIMENT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from experiments.pabbo_lda.figures_report import sections
    from experiments.pabbo_lda.pipeline import VERSION, stages
    from experiments.pabbo_lda.settings import MainSettings
    from raypipe.pipeline.experiment import Experiment

    return Experiment("pabbo_lda", VERSION, MainSettings, stages, sections)
