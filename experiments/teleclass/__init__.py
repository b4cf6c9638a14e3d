"""TELEClass: a taxonomy's labels for texts that nobody has labelled (Zhang et al., WWW 2025)."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``EXPERIMENT``, loaded when it is asked for: a task that refines needs no torch."""
    if name != "EXPERIMENT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from experiments.teleclass.figures import figures
    from experiments.teleclass.pipeline import VERSION, stages
    from experiments.teleclass.settings import TeleclassSettings
    from raypipe.pipeline.experiment import Experiment

    return Experiment("teleclass", VERSION, TeleclassSettings, stages, figures)
