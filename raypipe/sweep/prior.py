"""Predicted memory and speed of a sweep's trials, from their models, before any measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raypipe.errors import ConfigError
from raypipe.pipeline.identity import fingerprint
from raypipe.prediction import calibration, cards
from raypipe.prediction.cards import Card
from raypipe.storage.ledger import Row
from raypipe.storage.run_directory import RunDirectory
from raypipe.sweep.memory_model import MemoryFit
from raypipe.sweep.trials import Trial

if TYPE_CHECKING:
    from raypipe.prediction.forecast import Forecasts


@dataclass(frozen=True)
class Prior:
    """Predicted lines of memory by group, and predictions by the key of a trial's unit.

    A prediction has the columns of the table ``card_predictions``.
    """

    fits: Mapping[str, MemoryFit] = field(default_factory=dict)
    rows: Mapping[str, Row] = field(default_factory=dict)

    def ordered(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials, references first, then by predicted speed; as they are without it."""
        return sorted(trials, key=lambda trial: (not trial.reference, -self._speed(trial)))

    def _speed(self, trial: Trial) -> float:
        row = self.rows.get(trial.unit.key)
        return row["samples_per_s"] if row else 0.0


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
        return Prior() if card is None else on_card(trials, card, run_dir, say)
    except ConfigError as error:
        say(f"the trials are not predicted: {error}")
        return Prior()


def on_card(
    trials: Sequence[Trial], card: Card, run_dir: RunDirectory | None, say: Callable[[str], None]
) -> Prior:
    """Return the predictions for the trials that a card can run.

    Raises:
        ConfigError: a script trains, or a step needs values.

    """
    found = calibration.load(card.name)
    forecasts: dict[str, Forecasts] = {}
    fits: dict[str, MemoryFit] = {}
    rows: dict[str, Row] = {}
    for trial in trials:
        if trial.lacks is not None or trial.precision not in card.precisions:
            continue
        settings = trial.training.settings
        made = _forecasts(trial, run_dir, forecasts, say)
        if trial.group not in fits:
            line = made.line(card, settings, trial.accumulation)
            static, slope = (found.memory * part for part in line)
            fits[trial.group] = MemoryFit(static, slope, 0, 0.0)
        rows[trial.unit.key] = made.row(card, settings, found, trial.micro_batch)
    return Prior(fits, rows)


def _forecasts(
    trial: Trial,
    run_dir: RunDirectory | None,
    known: dict[str, Forecasts],
    say: Callable[[str], None],
) -> Forecasts:
    """Return the forecasts of a trial's training; those of another one with the same phases."""
    from raypipe.prediction.forecast import Forecasts
    from raypipe.training.task import TrainTask

    settings = trial.training.settings
    training, effective = settings.training, settings.training.effective_batch or 1
    rest = {key: value for key, value in trial.point.items() if ".training." not in key}
    phases = [training.steps, training.epochs]
    key = fingerprint([rest, effective, phases, settings.scaling.most_workers])
    if key not in known:
        task = trial.training.task(run_dir)
        if not isinstance(task, TrainTask):
            raise ConfigError("another program trains, which cannot be predicted")
        known[key] = Forecasts(task, settings, effective, key, say)
    return known[key]
