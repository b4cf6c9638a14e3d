"""Calibration of predictions by measurements: a JSON file per card, kept between runs."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from filelock import FileLock
from pydantic import PositiveFloat

from raypipe.config.settings import Settings
from raypipe.store.run_directory import RunDirectory, cache_directory

log = logging.getLogger(__name__)

#: relative half-width of an interval below which few measurements say nothing
_LEAST_SPREAD = 0.1


class Measurement(Settings):
    """A measurement of a training on a card, over its uncalibrated prediction.

    ``key`` tells trainings apart: the newest measurement of each counts. ``speed`` is the ratio of
    samples per second, ``memory`` that of peak bytes.
    """

    key: str
    speed: PositiveFloat
    memory: PositiveFloat | None = None


class _Record(Settings):
    card: str
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True)
class Calibration:
    """Correction of predictions: factors of speed and memory, with the range of the speed's.

    ``number`` counts the measurements; without any, the factors are 1 and the range is None.
    """

    number: int = 0
    speed: float = 1.0
    memory: float = 1.0
    speed_range: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """The certainty of a prediction, for its note."""
        if not self.number:
            return "predicted, uncalibrated"
        return f"predicted, calibrated by {self.number} measurement(s)"


def load(card: str) -> Calibration:
    """Return the calibration of a card by the measurements of earlier runs.

    A file that cannot be read is reported and counts as missing.
    """
    found = _measurements(_path(card))
    if not found:
        return Calibration()
    speeds = [each.speed for each in found]
    memories = [each.memory for each in found if each.memory is not None]
    middle = median(speeds)
    return Calibration(
        len(found),
        middle,
        max(memories, default=1.0),  # a peak must not be predicted too low
        (
            min(*speeds, middle * (1 - _LEAST_SPREAD)),
            max(*speeds, middle * (1 + _LEAST_SPREAD)),
        ),
    )


def save(card: str, measured: Sequence[Measurement]) -> None:
    """Add measurements of a card to the stored ones; a warning if the folder cannot be written."""
    new = [each for each in measured if math.isfinite(each.speed)]
    path = _path(card)
    try:
        with FileLock(path.with_suffix(".lock"), fallback_to_soft=False):
            both = {each.key: each for each in (*_measurements(path), *new)}
            record = _Record(card=card, measurements=tuple(both.values()))
            folder = RunDirectory.at(path.parent)  # writes are atomic
            folder.write(folder.path(path.name), record.model_dump_json(indent=2).encode())
    except OSError as error:
        log.warning("%s: the calibration cannot be kept: %s", path, error)


def _measurements(path: Path) -> tuple[Measurement, ...]:
    """Return the measurements in a file; none if it is missing or, with a warning, damaged."""
    try:
        return _Record.model_validate_json(path.read_bytes()).measurements
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        log.warning("%s: ignored, since it is damaged: %s", path, error)
        return ()


def _path(card: str) -> Path:
    return cache_directory() / "cards" / f"{re.sub(r'[^A-Za-z0-9]+', '-', card)}.json"
