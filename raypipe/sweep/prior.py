"""Predicted memory and speed of a sweep's trials, from their models, before any measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from raypipe.errors import ConfigError
from raypipe.hardware import Arithmetic
from raypipe.pipeline.identity import fingerprint
from raypipe.prediction import cards
from raypipe.storage.run_directory import RunDirectory
from raypipe.sweep.memory_model import MemoryFit
from raypipe.sweep.trials import Trial

if TYPE_CHECKING:
    from raypipe.prediction.forecast import Forecasts


@dataclass(frozen=True)
class Prior:
    """Predicted lines of memory by group, and samples per second by the key of a trial's unit."""

    fits: Mapping[str, MemoryFit] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)

    def ordered(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials, references first, then by predicted speed; as they are without it."""
        return sorted(trials, key=lambda t: (not t.reference, -self.speeds.get(t.unit.key, 0.0)))


def predicted(
    trials: Sequence[Trial],
    device: tuple[str, int | None],
    run_dir: RunDirectory,
    say: Callable[[str], None],
) -> Prior:
    """Return the predictions for trials.

    There are none for a card that is not listed, a CPU, fp8, and a step that needs values.

    Args:
        trials: the trials.
        device: name and memory of the GPU, as of :attr:`TrialMaker.device`.
        run_dir: of the sweep, with the data.
        say: receives a message.

    """
    name, memory_bytes = device
    if name == "cpu":
        return Prior()
    try:
        card = cards.of_device(name, memory_bytes, cards.cards().values())
    except ConfigError as error:
        say(f"the trials are not predicted: {error}")
        return Prior()
    if card is None:
        return Prior()
    forecasts: dict[str, Forecasts] = {}
    fits: dict[str, MemoryFit] = {}
    speeds: dict[str, float] = {}
    for trial in trials:
        if trial.lacks is not None or trial.precision not in get_args(Arithmetic):
            continue
        settings = trial.training.settings
        try:
            made = _forecasts(trial, run_dir, forecasts, say)
            if made is None:
                return Prior()
            if trial.group not in fits:
                static, slope = made.line(card, settings, trial.accumulation)
                fits[trial.group] = MemoryFit(static, slope, 0, 0.0)
            speeds[trial.unit.key] = made.speed(card, settings, trial.micro_batch)
        except ConfigError as error:
            say(f"the trials are not predicted: {error}")
            return Prior()
    return Prior(fits, speeds)


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
