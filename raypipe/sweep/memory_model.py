"""Memory model: peak bytes = static + slope x micro-batch, refitted after every trial.

Trials that differ in the micro-batch alone share a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from raypipe.hardware import bytes_text

# scatter of peaks: a few MiB (the allocator's granularity) plus about 1 %, so errors are
# weighted by peak + this
_GRANULARITY = 400 * 2**20


@dataclass(frozen=True)
class Measurements:
    """Measurements of a group: peak bytes by micro-batch, and micro-batches out of memory."""

    peaks: Mapping[int, int] = field(default_factory=dict)
    failed: frozenset[int] = frozenset()

    @property
    def failed_micro_batch(self) -> int | None:
        """The smallest micro-batch that ran out of memory, above every one that succeeded."""
        largest = max(self.peaks, default=0)
        return min((size for size in self.failed if size > largest), default=None)

    def corrected_by(self, newer: Measurements) -> Measurements:
        """Return these merged with newer ones; the newer win where both contradict each other."""
        fits, fails = max(newer.peaks, default=0), newer.failed_micro_batch or math.inf
        peaks = {size: peak for size, peak in self.peaks.items() if size < fails}
        failed = frozenset(size for size in self.failed | newer.failed if size > fits)
        return Measurements(peaks | dict(newer.peaks), failed)


@dataclass(frozen=True)
class MemoryFit:
    """Line through the peaks: bytes at micro-batch 0, and bytes per sample.

    It is fitted to ``trials`` trials, the largest peak of each micro-batch; 0 if it is predicted
    from the model. ``largest_error`` is its largest error relative to the measured peak.
    """

    static_bytes: float
    bytes_per_sample: float
    trials: int
    largest_error: float

    @property
    def basis(self) -> str:
        """The basis of the line, in words."""
        return f"fit to {self.trials} trials" if self.trials else "predicted from the model"

    def predict(self, micro_batch: int) -> float:
        """Return the predicted peak in bytes."""
        return self.static_bytes + self.bytes_per_sample * micro_batch


@dataclass(frozen=True)
class Verdict:
    """Whether a micro-batch fits, the reason, and the predicted peak in bytes if there is one."""

    outcome: Literal["fits", "does_not_fit", "unknown"]
    reason: str
    predicted_bytes: float | None


class MemoryModel:
    """Memory model of a group on a device of ``capacity_bytes``; None if the limit is unknown.

    A prediction within ``margin`` (a fraction) of the capacity is inconclusive: such a micro-batch
    is worth a trial. ``preset`` has the measurements of earlier runs; those of this run override
    it, in any order. ``prior`` is a predicted line, used until two micro-batches are measured.

    Raises:
        ValueError: the capacity is not above 0, or the margin is outside [0, 1).

    """

    def __init__(
        self,
        capacity_bytes: int | None,
        margin: float = 0.05,
        preset: Measurements = Measurements(),
        prior: MemoryFit | None = None,
    ) -> None:
        if capacity_bytes is not None and not capacity_bytes > 0:
            raise ValueError(f"capacity_bytes = {capacity_bytes}: must be above 0, or None")
        if not 0 <= margin < 1:
            raise ValueError(f"margin = {margin}: must be at least 0 and below 1")
        self.capacity_bytes = capacity_bytes
        self.margin = margin
        self._preset, self._prior = preset, prior
        self._update(Measurements())

    def observe(self, micro_batch: int, peak_bytes: int) -> None:
        """Record the peak of a succeeded trial. Raises ValueError for numbers below 1."""
        size, peak = _whole("micro_batch", micro_batch), _whole("peak_bytes", peak_bytes)
        peaks = {**self.measured.peaks, size: max(peak, self.measured.peaks.get(size, 0))}
        self._update(Measurements(peaks, self.measured.failed))

    def ran_out(self, micro_batch: int) -> None:
        """Record that a trial ran out of memory. Raises ValueError for a micro-batch below 1."""
        failed = self.measured.failed | {_whole("micro_batch", micro_batch)}
        self._update(Measurements(self.measured.peaks, failed))

    def fit(self) -> MemoryFit | None:
        """The fitted line, or the predicted one; None with neither."""
        return self._fit

    def predict(self, micro_batch: int) -> float | None:
        """Return the predicted peak in bytes; None without a fit."""
        return self._fit.predict(micro_batch) if self._fit else None

    @property
    def failed_micro_batch(self) -> int | None:
        """The smallest micro-batch that ran out of memory and that no success contradicts."""
        return self._known.failed_micro_batch

    @property
    def limit_bytes(self) -> float | None:
        """The capacity, or the predicted peak of a trial that ran out of memory if lower."""
        if self.capacity_bytes is None or self._fit is None or self.failed_micro_batch is None:
            return self.capacity_bytes
        return min(self.capacity_bytes, self._fit.predict(self.failed_micro_batch))

    def verdict(self, micro_batch: int) -> Verdict:
        """Predict whether a micro-batch fits: from measurements, else from the fitted line.

        A failure of an earlier run rules out larger micro-batches only; its own micro-batch is
        judged by the fit, because the cause may be gone.
        """
        _whole("micro_batch", micro_batch)
        predicted = self.predict(micro_batch)
        fitted = min((size for size in self._known.peaks if size >= micro_batch), default=None)
        if fitted is not None:
            return Verdict("fits", f"micro-batch {fitted} with the same settings fits", predicted)
        failed = self.failed_micro_batch
        if failed is not None:
            earlier = failed not in self.measured.failed
            if micro_batch > failed or (micro_batch == failed and not earlier):
                reason = f"micro-batch {failed} with the same settings ran out of memory"
                reason += " in an earlier run" if earlier else ""
                return Verdict("does_not_fit", reason, predicted)
        limit = self.limit_bytes
        if self._fit is None or predicted is None:
            return Verdict("unknown", "fewer than two micro-batches were measured", None)
        if limit is None:
            return Verdict("unknown", "the capacity is not known", predicted)
        reason = (
            f"predicted {bytes_text(predicted)} of {bytes_text(limit)}: "
            f"{bytes_text(self._fit.static_bytes)} + {bytes_text(self._fit.bytes_per_sample)} "
            f"a sample ({self._fit.basis})"
        )
        if predicted > limit * (1 + self.margin):
            return Verdict("does_not_fit", reason, predicted)
        if predicted < limit * (1 - self.margin):
            return Verdict("fits", reason, predicted)
        return Verdict("unknown", reason, predicted)

    def largest_micro_batch(self) -> int | None:
        """Return the largest micro-batch that is predicted or known to fit.

        None without a fit or a capacity, or if memory does not grow with the micro-batch.
        """
        limit = self.limit_bytes
        if self._fit is None or limit is None:
            return None
        room, slope = limit - self._fit.static_bytes, self._fit.bytes_per_sample
        bound = math.floor(room / slope) if slope else math.inf if room >= 0 else 0
        if self.failed_micro_batch is not None:
            bound = min(bound, self.failed_micro_batch - 1)
        largest = max(bound, *self._known.peaks)
        return int(largest) if math.isfinite(largest) else None

    def _update(self, measured: Measurements) -> None:
        #: measurements of this run, without the preset
        self.measured = measured
        self._known = self._preset.corrected_by(measured)
        self._fit = _fitted(self._known.peaks) or self._prior


def _whole(name: str, value: int) -> int:
    if not 1 <= value < math.inf:
        raise ValueError(f"{name} = {value}: must be a whole number above 0")
    return int(value)


def _fitted(peaks: Mapping[int, int]) -> MemoryFit | None:
    """Fit a line by least squares of the relative errors, with coefficients of at least 0."""
    if len(peaks) < 2:
        return None
    from scipy.optimize import nnls  # slow to import, and every run imports this module

    sizes, measured = np.array(sorted(peaks.items()), dtype=np.float64).T
    weights = 1 / (measured + _GRANULARITY)
    design = np.stack([np.ones_like(sizes), sizes / sizes.max()], axis=1)
    # scaled by the largest peak and micro-batch, for numbers near 1
    weights, unit = weights / weights.max(), measured.max()
    (static, slope), _ = nnls(weights[:, None] * design, weights * measured / unit)
    static, slope = float(static * unit), float(slope * unit / sizes.max())
    errors = np.abs(static + slope * sizes - measured) / measured
    return MemoryFit(static, slope, len(peaks), float(errors.max()))
