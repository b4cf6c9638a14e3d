"""Predicted memory of a sweep's trials, from their models, before anything was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raypipe.errors import ConfigError
from raypipe.pipeline.identity import fingerprint
from raypipe.prediction import cards
from raypipe.storage.run_directory import RunDirectory
from raypipe.sweep.memory_model import MemoryFit
from raypipe.sweep.trials import Trial

if TYPE_CHECKING:
    from raypipe.prediction.forecast import Forecasts


def predicted_fits(
    trials: Sequence[Trial],
    device: tuple[str, int | None],
    run_dir: RunDirectory,
    say: Callable[[str], None],
) -> Mapping[str, MemoryFit]:
    """Return the predicted line of each group of trials.

    Groups of a card that is not listed, of a CPU, and of a step that needs values have none.

    Args:
        trials: the trials.
        device: name and memory of the GPU, as of :attr:`TrialMaker.device`.
        run_dir: of the sweep, with the data.
        say: receives a message.

    """
    name, memory_bytes = device
    card = cards.of_device(name, memory_bytes, cards.cards().values())
    if card is None:
        return {}
    forecasts: dict[str, Forecasts] = {}
    found: dict[str, MemoryFit] = {}
    for trial in trials:
        if trial.group in found or trial.lacks is not None:
            continue
        try:
            made = _forecasts(trial, run_dir, forecasts, say)
            if made is not None:
                static, slope = made.line(card, trial.training.settings, trial.accumulation)
                found[trial.group] = MemoryFit(static, slope, 0, 0.0)
        except ConfigError as error:
            say(f"the memory of the trials is not predicted: {error}")
            return {}
    return found


def _forecasts(
    trial: Trial, run_dir: RunDirectory, known: dict[str, Any], say: Callable[[str], None]
) -> Forecasts | None:
    """Return the forecasts of a trial's training; those of another one with the same task."""
    from raypipe.prediction.forecast import Forecasts
    from raypipe.training.task import TrainTask

    settings = trial.training.settings
    effective = settings.training.effective_batch or 1
    rest = {key: value for key, value in trial.point.items() if ".training." not in key}
    key = fingerprint([rest, effective, settings.scaling.most_workers])
    if key not in known:
        task = trial.training.task(run_dir)
        if not isinstance(task, TrainTask):
            return None
        known[key] = Forecasts(task, settings, effective, key, say)
    made: Forecasts = known[key]
    return made
